// The transport over torch.distributed: any backend, any device.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>

#include "zero/transport.h"

namespace c10d {
class ProcessGroup;
}

namespace zero {

// Does not own the group: once that is destroyed, transfers fail with an error
// that says so. What starts one must not hold the GIL: it may drop the last
// reference to the group. Timeouts are the group's own. Thread safety,
// blocking and streams as in transport.h.
//
// `series`: equal on all ranks, and another one for each transport over this
// group (the lowest 15 bits count): what one that broke off has left in the
// group's sockets is not taken for a transfer of another.
std::unique_ptr<Transport> make_c10d_transport(
    const c10::intrusive_ptr<::c10d::ProcessGroup>& group,
    uint32_t series);

}  // namespace zero
