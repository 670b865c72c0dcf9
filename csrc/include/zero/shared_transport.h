// The transport between CPU ranks of one host: weights and gradients lie in a
// segment that all ranks map, and control words there say what may be read.
//
// A wait spins for some microseconds, then sleeps on a futex in the segment. It
// wakes every kSlice to see whether a peer has died or given up, whether the
// time is over, and whether the caller was interrupted.
//
// Collectives of the Transport interface (of arenas that are not shared) go
// through the transport it is made with.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "zero/shared_segment.h"
#include "zero/transport.h"

namespace zero {

struct SharedOptions {
  int rank = 0;
  // Process of each rank, in order; that of a thread is its own process.
  std::vector<pid_t> pids;
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  // Bytes of the segment that are this rank's at rest, for the allocator meter,
  // which counts of what ranks share each rank's part.
  int64_t rest_bytes = 0;
  // Called in each slice of a wait, on the thread that waits. True ends the
  // wait with an error.
  std::function<bool()> interrupted;
};

// Spaces of the segment: 0 is for control words behind a first page that is not
// touched here, 1 is not touched, then follow kSlots, kKept, and kOwn of each
// rank. `inner` may be null where no such collective is used.
Result<std::unique_ptr<Transport>> make_shared_transport(
    std::unique_ptr<Transport> inner,
    std::shared_ptr<SharedSegment> segment,
    SharedOptions options);

}  // namespace zero
