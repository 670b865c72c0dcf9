// Direct: transfers between ranks that read each other's memory, at the offsets
// that the caller planned.
//
// An operation is a gather (this rank writes its part of slots that all ranks
// share) or a reduction (this rank writes its gradients where peers read them).
// Before it writes it must know that every peer has released what lay there
// before. start() never waits for that: where a peer is behind, the copy is made
// by a later call, and at the latest by wait().
//
// States of an operation: idle -start-> started -wait-> started -release-> idle.
//
// Ownership  Holds the tensors to copy until they are copied.
// Blocking   wait() and finish() block for peers; nothing else does.
// Threads    Every method may be called from any thread; the calls on one
//            operation must not overlap.
#pragma once

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "zero/status.h"
#include "zero/transport.h"

namespace zero {

class Direct {
 public:
  struct Copy {
    at::Tensor from;
    at::Tensor to;  // same sizes; any dtype
  };
  // Bytes [begin, end) of an arena.
  using Range = std::pair<int64_t, int64_t>;

  explicit Direct(PeerMemory& peers) : peers_(peers) {}

  // `ranges`: all that its peers may still read when it has started again.
  int add(int arena, std::vector<Range> ranges, std::string label);

  // `offset`: see PeerMemory::publish(). True if the copies are made; else the
  // tensors are held until they are.
  Result<bool> start(int op, std::vector<Copy> copies, int64_t offset);
  // Until every rank's part can be read.
  Status wait(int op);
  // This rank reads it no more.
  void release(int op);
  // Number of the transfer under way, for PeerMemory::published().
  int64_t number(int op) const;

  // Drops what is under way.
  void clear();

 private:
  struct Op {
    int arena;
    std::vector<Range> ranges;
    std::string label;
    int64_t number = -1;  // of its last transfer
    bool busy = false;  // between start and release
    std::vector<int> overlaps;  // itself too
    size_t known = 0;  // operations that `overlaps` has been made for
  };
  struct Pending {
    int op;
    int64_t number;
    int64_t offset;
    std::vector<Copy> copies;
    std::vector<int64_t> after;  // transfers that must be released before
  };

  void find_overlaps(Op& op);
  // Makes the copies whose time has come. Gives what it held, to be dropped
  // without the lock. What failed stays, and fails again in the wait for it.
  Status advance(std::vector<Copy>& dropped);
  Status make(Pending& pending);

  PeerMemory& peers_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Op>> ops_;
  std::vector<Pending> pending_;  // in the order of their numbers
  std::set<int64_t> busy_;  // numbers between start and release
};

}  // namespace zero
