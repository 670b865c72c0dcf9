// The sum over ranks of gradients that lie in memory: each element is added up
// in the order of the ranks, rounded to `dtype` after each addition, divided by
// `divisor` in `dtype`, and cast to the dtype of `out` last. So the bits depend
// on the inputs alone.
//
// Blocking   Runs at memory speed, on torch's intra-op threads.
// Threads    Safe on different outputs.
#pragma once

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <vector>

#include "zero/status.h"

namespace zero {

// `parts`: for each rank, out.numel() elements of `dtype`; no overlap with out,
// which is contiguous. Fails for dtypes that are not floating point.
Status sum_parts(
    const std::vector<const void*>& parts,
    c10::ScalarType dtype,
    double divisor,
    const at::Tensor& out);

}  // namespace zero
