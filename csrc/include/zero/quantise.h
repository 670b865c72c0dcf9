// Rows of numbers as blocks of 8 bits a number with a scale each, as they travel:
// what zero_compiler/quantised_blocks.py says, to the bit.
//
// A packed chunk is its numbers, one byte each, then zeros up to a multiple of
// four bytes, then the float32 scale of each block, row by row.
//
// Blocking   Runs on torch's intra-op threads; on an accelerator it is queued on
//            the current stream, some million numbers at a time, so that what
//            stands beside takes little room.
// Threads    Safe on different outputs.
#pragma once

#include <ATen/core/TensorBody.h>

#include <cstdint>

#include "zero/status.h"

namespace zero {

// Whether numbers can travel in `wire`.
bool can_quantise_to(c10::ScalarType wire);
// Whether they can be packed from, and unpacked to, `dtype`.
bool can_quantise_from(c10::ScalarType dtype);

// Of `numel` numbers in rows of `row`.
int64_t packed_bytes(int64_t numel, int64_t row);

// `chunk`: flat, contiguous, whole rows. `out`: packed_bytes() of kByte, at a
// multiple of four bytes.
Status pack_rows(
    const at::Tensor& chunk,
    int64_t row,
    c10::ScalarType wire,
    const at::Tensor& out);

// The inverse, as nearly as 8 bits can hold it, in the dtype of `out`.
Status unpack_rows(
    const at::Tensor& packed,
    int64_t row,
    c10::ScalarType wire,
    const at::Tensor& out);

// The same by torch's operators, as it is done where the CPU does not compute.
void pack_by_operators(
    const at::Tensor& chunk,
    int64_t row,
    c10::ScalarType wire,
    const at::Tensor& out);
void unpack_by_operators(
    const at::Tensor& packed,
    int64_t row,
    c10::ScalarType wire,
    const at::Tensor& out);

}  // namespace zero
