// A meter for CPU memory: counts the live bytes of c10's CPU allocator, exactly
// as requested (padding and the meter's own 64 bytes a block are left out).
//
// This and the allocator of cpu_allocator.h are the only global state in the
// runtime: c10 has one CPU allocator. A block is counted when it was allocated
// while the meter was installed, until it is freed by whichever thread, whether
// the meter is still installed or not. Blocks from before are never counted.
//
// Counting is two atomic operations, without locks. install() and uninstall()
// replace the global allocator, which c10 does not synchronise: call them while
// no other thread allocates tensors.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>

namespace zero::meter {

void install();  // no effect if installed
void uninstall();  // no effect if not installed
// Whether it is installed, and counts what this allocator gives.
bool is_around(const c10::Allocator* inner);

int64_t current();
int64_t peak();  // since the start or the last reset_peak()
void reset_peak();

// For memory that the runtime takes past c10's allocator (arenas). Returns
// whether the bytes were counted; if so, give them to freed() later.
bool allocated(size_t nbytes);
void freed(size_t nbytes);

}  // namespace zero::meter
