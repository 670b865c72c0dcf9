// Transport: the collectives a plan needs, on flat contiguous tensors.
//
// Contract for every implementation
//   Ownership  A handle keeps alive whatever the transport still reads or
//              writes, also after the handle is destroyed: dropping a handle
//              without waiting gives up the result, it frees no memory in use.
//   Blocking   start_* may block briefly (to queue), never for a peer.
//              wait() blocks the host on CPU tensors. On an accelerator it makes
//              the device's current stream wait and returns at once.
//   Streams    start_* orders the transfer after what is queued on the current
//              stream, as c10d does.
//   Order      All ranks start the same collectives in the same order. Several
//              may be in flight, and they may be waited for in any order.
//   Threads    start_* calls must not overlap (the Engine serialises them);
//              wait() on different handles may run on different threads.
//   Errors     A dead peer or a timeout is a failed Status. Nothing throws.
#pragma once

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "zero/status.h"

namespace zero {

class Handle {
 public:
  virtual ~Handle() = default;
  // At most once.
  virtual Status wait() = 0;
};

using StartResult = Result<std::unique_ptr<Handle>>;

// `numel` numbers that lie in rows of `row`.
struct Rows {
  int64_t numel = 0;
  int64_t row = 1;
};

// What a transport offers besides, where ranks can read each other's memory:
// shared memory between CPU ranks of one host, symmetric memory between GPUs.
// Nothing is sent then. A rank writes, publishes, and its peers read in place.
//
// Words
//   space      kSlots and kKept are the same bytes on every rank. kOwn is this
//              rank's alone to write, and every peer's to read.
//   transfer   numbered 0, 1, ... in the order in which they begin, which is the
//              same on every rank. For each one a rank publishes once, when its
//              part is written, and releases once, when it reads no more of it.
//   call       begins once the caller knows that every rank is in it, and ends
//              with leave(). Inside, no rank changes what lies at rest; outside,
//              no rank reads what belongs to others.
//
// Blocking   What is named wait_* and leave() block for peers, and fail when
//            a peer is dead, gave up or is late. Nothing else blocks.
// Threads    begin(), publish() and release() of one transfer must not overlap.
//            All else may be called from any thread.
class PeerMemory {
 public:
  enum class Space { kSlots, kKept, kOwn };

  virtual ~PeerMemory() = default;

  // The first `nbytes` of a space. A larger block of a space begins with the
  // same bytes. The tensor keeps its memory mapped.
  virtual Result<at::Tensor> block(Space space, int64_t nbytes) = 0;

  // Number of the next transfer.
  virtual int64_t begin() = 0;
  // At most this many transfers can be between begin() and every peer's
  // release(): before publishing number n, n - window() must be released.
  virtual int64_t window() const = 0;

  // `offset`: where this rank's part lies in its kOwn, if it lies there.
  virtual void publish(int64_t number, int64_t offset) = 0;
  virtual Status wait_published(int64_t number, const std::string& label) = 0;
  // Where `rank` published `nbytes` of its kOwn, after wait_published().
  virtual Result<const void*> published(
      int rank,
      int64_t number,
      int64_t nbytes) = 0;

  virtual void release(int64_t number) = 0;
  // Whether every rank released it.
  virtual bool released(int64_t number) = 0;
  virtual Status wait_released(int64_t number, const std::string& label) = 0;

  // Returns once every rank has reached the end of the call.
  virtual Status leave() = 0;

  // Peers that wait for this rank fail with the reason. The first one counts.
  virtual void give_up(const std::string& reason) = 0;
  // Peers that wait for this rank fail, now that it is gone for good.
  virtual void close() = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;

  // For messages: "gloo", "local", ...
  virtual std::string name() const = 0;

  // out[k * in.numel() + i] = rank k's in[i]. in and out do not overlap.
  virtual StartResult start_all_gather(
      const at::Tensor& in,
      const at::Tensor& out) = 0;

  // out[i] = sum over ranks of in[rank * out.numel() + i]. `in` is left as it
  // was, and does not overlap out.
  virtual StartResult start_reduce_scatter(
      const at::Tensor& in,
      const at::Tensor& out) = 0;

  // inout[i] = sum over ranks of inout[i].
  virtual StartResult start_all_reduce(const at::Tensor& inout) = 0;

  // out[k * n + i] = rank k's in[rank * n + i], with n numbers for each rank. in
  // and out do not overlap. Fails where the transport knows no such collective.
  virtual StartResult start_all_to_all(
      const at::Tensor& in,
      const at::Tensor& out);

  // The same sum as start_reduce_scatter(), of which what goes from host to host
  // does so packed in `wire` (quantise.h). `parts` follow each other in `out`.
  // Fails where the transport does not tell hosts apart.
  virtual StartResult start_packed_reduce_scatter(
      const at::Tensor& in,
      const at::Tensor& out,
      c10::ScalarType wire,
      std::vector<Rows> parts);

  // What the next start_* is of, in a profile of a thread of the transport's own.
  virtual void about(const std::string& /*label*/) {}

  // Null where ranks cannot read each other's memory. Lives as long as the
  // transport.
  virtual PeerMemory* peers() {
    return nullptr;
  }

  // Peers that wait for this rank fail with the reason, where they can be told:
  // those that share memory with it. The first one counts. From any thread.
  virtual void give_up(const std::string& reason) {
    if (PeerMemory* memory = peers(); memory != nullptr) {
      memory->give_up(reason);
    }
  }

  // Waits of this rank for a peer over a process group, now and later, fail with
  // the reason: the peer has failed. From any thread.
  virtual void stop_waiting(const std::string& /*reason*/) {}

  // Memory that the transport keeps for itself, for the engine's counters.
  virtual int64_t scratch_bytes() const {
    return 0;
  }
};

// World size 1 without a process group: a gather and a reduce are copies, done
// in start_*, and an all-reduce does nothing.
class LocalTransport final : public Transport {
 public:
  std::string name() const override;
  StartResult start_all_gather(const at::Tensor& in, const at::Tensor& out)
      override;
  StartResult start_reduce_scatter(
      const at::Tensor& in,
      const at::Tensor& out) override;
  StartResult start_all_reduce(const at::Tensor& inout) override;
};

}  // namespace zero
