// Memory of the host straight from the system, outside the C library's heap.
//
// What lives from step to step (arenas, gradients) in the heap leaves holes
// there that the next activations do not fit; outside, the heap has only what
// comes and goes, and a block that is freed is the system's again at once.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>

namespace zero {

// From here on a block of its own is worth the system call and the page faults.
constexpr size_t kHostBlockBytes = size_t{1} << 20;

// Undefined contents, which the meter counts; begins on a page, and where it can
// hold a huge one on such a page. Pages are taken when first touched, and given
// back with the pointer. Any thread. Throws std::bad_alloc.
c10::DataPtr host_block(size_t nbytes);

}  // namespace zero
