// The transport between CPU ranks of several hosts, whose ranks share memory
// inside each host: every byte crosses to a host once, not once a rank.
//
// Ranks are numbered host by host, equally many on each: rank h * L + l has
// place l on host h. A rank talks to those with its place on the other hosts
// (`across`, in the order of hosts), and to those of its host through memory
// (`inside`, in the order of places).
//
//   all-gather      across: the chunks of its place, into memory that its host
//                   reads; then each rank copies all chunks from there.
//   reduce-scatter  inside: for each host, the sum over this host's ranks of what
//                   is due to this place there; then across.
//                   Packed: each rank sends the blocks of its host's sums across,
//                   and adds what arrives to its own host's sum in float32.
//   all-reduce      inside: the sum over this host's ranks; then across.
//
// Sums are made inside a host first, in the order of ranks, so their bits do not
// change from run to run, and differ from another transport's by the order.
//
// A thread of its own carries collectives out, one after another, in the order in
// which they were started. So a start never waits for a peer, and handles may be
// waited for in any order. After a failure all that follows fails with its reason.
// A rank that gives up ends the waits of its host's ranks at once; other hosts learn
// of it across, at the latest when the group's time is over.
#pragma once

#include <functional>
#include <memory>

#include "zero/transport.h"

namespace zero {

struct HostsOptions {
  int rank = 0;  // of all
  int world = 1;
  int local_world = 1;  // L
  // Called in each slice of a wait, on the thread that waits. True ends the
  // wait with an error.
  std::function<bool()> interrupted;
};

// `across` has world / local_world ranks; `inside` has peers().
std::unique_ptr<Transport> make_hosts_transport(
    std::unique_ptr<Transport> across,
    std::unique_ptr<Transport> inside,
    HostsOptions options);

}  // namespace zero
