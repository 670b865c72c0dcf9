// A c10 allocator for CPU memory whose freed blocks fit the next block of the
// same size.
//
// c10's own asks glibc for 64-byte alignment (posix_memalign). glibc then takes
// some 100 bytes more than the block needs and frees what is left over in front
// of it and behind it. Small objects that live on settle in these remainders.
// From then on the room that the block leaves is too small for a block of the
// same size, remainders included. A training step frees and allocates the same
// sizes again and again: with 12 layers of 1024, some 400 MiB of the heap became
// such rooms. This allocator asks malloc() for the size and 64 bytes, and aligns
// the block within that, so what is freed is what is asked for next.
//
// All else is as with c10's own: alignment, simple data pointers (the data
// pointer is its own context), reports to the profiler, errors. Blocks may be
// freed by any thread, also after a fork.
#pragma once

#include <c10/core/Allocator.h>

namespace zero {

// The allocator; it is never destroyed. Thread-safe.
c10::Allocator* cpu_allocator();

// From here on c10 allocates CPU memory with it, in the whole process. Blocks
// from before are freed as they were allocated. Returns whether it is in use.
//
// It replaces c10's own allocator alone, and that only where it takes its blocks
// from glibc's heap. Nothing changes where somebody has installed another
// allocator (the meter goes around either), where malloc() is another library's,
// where torch was built with mimalloc, or where c10 was told to fill blocks, to
// bind them to NUMA nodes or to use huge pages.
//
// c10 does not synchronise this. A thread that allocates meanwhile gets a block
// of one or of the other, and either is freed as it was allocated. No two
// threads may be in this function, or in the meter's, at once.
bool install_cpu_allocator();

// Whether c10 allocates with it, with or without the meter around it.
bool cpu_allocator_is_installed();

}  // namespace zero
