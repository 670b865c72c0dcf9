// Engine: runs the transfers of a plan. It decides nothing: what moves, where
// the bytes lie and when a transfer starts and is waited for comes from the
// caller.
//
// Words
//   world W, rank r. A parameter [n, ...] is cut along dim 0 into W padded
//   chunks of chunk_numel elements (FSDP2's layout): the rank-major
//   concatenation of the chunks begins with the full tensor.
//   A gather makes a bucket of full parameters out of every rank's chunks; a
//   reduce makes this rank's chunks of the mean gradients out of every rank's
//   full gradients.
//
// States of a gather: idle -start-> started -wait-> ready -release-> idle.
// States of a reduce: idle -start-> started -wait-> idle.
// A call in another state is an error that names the label and changes nothing.
//
// Ownership  The Engine owns its transport, arenas and pool. Inputs are held
//            from start to wait. Tensors returned by gather_wait lie in the
//            arena and are valid until release; tensors returned by reduce_wait
//            belong to the caller.
// Blocking   *_start copies at most (never waits for a peer); *_wait and leave
//            block for peers on CPU, and queue on an accelerator (transport.h).
// Streams    Copies run on the current stream of the arena's device. Make the
//            calls of one engine on one stream, or order the streams yourself.
// Threads    Every method may be called from any thread. Starts are serialised.
//            The lock is not held while a wait blocks.
// Failure    A failed collective poisons the engine: that call and each later
//            one return the same reason at once. Buffers of transfers still in
//            flight stay alive until those transfers let go of them.
#pragma once

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "zero/arena.h"
#include "zero/direct.h"
#include "zero/recycler.h"
#include "zero/status.h"
#include "zero/transport.h"

namespace zero {

struct GatherParam {
  int64_t chunk_numel = 0;
  std::vector<int64_t> sizes;  // of the full tensor
  int64_t out_offset = 0;  // bytes; the slot holds W * chunk_numel elements
};

struct GatherSpec {
  int arena = 0;
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::string label;
  std::vector<GatherParam> params;
  // Bytes, or -1. More than one parameter: [S] input, then [W * S] output, with
  // S the sum of chunk_numel. One parameter: [S] input, used only for a cast.
  int64_t staging_offset = -1;
  int staging_arena = -1;  // -1: that of the slots
  // Where it is defined, chunks travel in it, packed (quantise.h): staging then
  // has S bytes and W * S bytes, with S the sum of their packed_bytes().
  c10::ScalarType wire = c10::ScalarType::Undefined;
};

struct ReduceParam {
  int64_t chunk_numel = 0;  // replicated: the number of elements
  std::vector<int64_t> sizes;  // of the full gradient
};

struct ReduceSpec {
  int arena = 0;
  c10::ScalarType dtype = c10::ScalarType::Float;  // of the arithmetic
  std::string label;
  std::vector<ReduceParam> params;
  // Bytes, or -1. Sharded: [W * S] input, then [S] output. Replicated: [S].
  // Not used by a single parameter that can be reduced from where its gradient
  // lies to where the result goes (see Engine::reduce_start).
  int64_t staging_offset = -1;
  bool replicated = false;
  c10::ScalarType out_dtype = c10::ScalarType::Float;
  double divisor = 1.0;
  // The results are gone soon: they go on to another tier, or are parts of one.
  bool passes = false;
  // Where it is defined, what goes from host to host does so packed in it
  // (quantise.h). Sharded only, over a transport that tells hosts apart.
  c10::ScalarType wire = c10::ScalarType::Undefined;
};

struct Counters {
  int64_t gathers = 0;  // collectives and local hand-overs alike
  int64_t reduces = 0;
  int64_t bytes_gathered = 0;  // size of what the transport gathered, all ranks
  int64_t bytes_reduced = 0;  // size of what the transport summed, one rank
  int64_t arena_bytes = 0;  // allocated so far, also where engines share it
  int64_t arena_bytes_planned = 0;
  int64_t shared_bytes = 0;  // in blocks that ranks share, planned; not in those
  int64_t scratch_bytes = 0;  // kept by the transport
  int64_t allocations = 0;  // blocks allocated: arenas and pool
  int64_t arena_allocations = 0;  // of these, arenas, shared ones too
  int64_t recycled = 0;  // reduce outputs that needed no allocation
};

struct EngineOptions {
  // Fill a gather's slots with NaN when it is released, so that a test sees a
  // read that comes too late.
  bool scribble_on_release = false;
};

class Engine {
 public:
  // `transport` must span `world` ranks, of which this is `rank`.
  Engine(
      std::unique_ptr<Transport> transport,
      int rank,
      int world,
      EngineOptions options = {});
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // The arena is allocated when first needed.
  Result<int> add_arena(int64_t nbytes, c10::Device device);
  // An arena in memory that peers read (see PeerMemory): gathers into it and
  // reductions from it send nothing. Slots of gathers belong in kSlots or kKept,
  // at the same offsets on every rank; staging of reductions belongs in kOwn and
  // holds the gradients one after the other. A weight in such an arena must not
  // be read, and a shard or a gradient there not be written, outside a call.
  Result<int> add_shared_arena(int64_t nbytes, PeerMemory::Space space);
  // Makes an arena at least `nbytes` large. A larger one is a new block: what
  // lay in the old one is lost, so none of its transfers may be under way.
  // True if it grew.
  Result<bool> grow_arena(int id, int64_t nbytes);
  // Puts another arena in the place of one, as a larger block does. Nothing where
  // the engine is of no use any more: others go on in that arena.
  Status place_arena(int id, std::shared_ptr<Arena> arena);
  Result<int> add_gather(GatherSpec spec);
  Result<int> add_reduce(ReduceSpec spec);

  // One flat contiguous shard of chunk_numel elements a parameter; cast on
  // copy-in where its dtype is not the gather's. A lone parameter of the
  // gather's dtype is gathered straight from the shard into its slot.
  Status gather_start(int id, std::vector<at::Tensor> shards);
  // The full tensors: the same tensor objects each time. World size 1 without a
  // cast: views of the shards themselves.
  Result<std::vector<at::Tensor>> gather_wait(int id);
  Status release(int id);

  // One full gradient a parameter, in any layout. A lone parameter whose rows
  // divide evenly and whose gradient is contiguous and of `dtype` is read where
  // it lies, and is left as it was.
  Status reduce_start(int id, std::vector<at::Tensor> grads);
  // Sharded: flat chunks [chunk_numel]; replicated: tensors of `sizes`. Summed
  // in `dtype`, divided there by a true division, cast to `out_dtype` last.
  // World size 1 with nothing to convert: the gradients themselves, flattened.
  Result<std::vector<at::Tensor>> reduce_wait(int id);

  // Frees storages of results that nobody holds any more, until at most `nbytes`
  // of such wait to be used again; and before one is made from here on. Negative:
  // all of them wait. Of results that pass (see ReduceSpec) none waits, and none
  // while another is made: they take no more than those do that are there at once.
  void trim(int64_t nbytes);

  // A contiguous tensor for what leaves the engine in parts, of a size that
  // expect_output() announced: recycled like the outputs of reductions.
  Status expect_output(int64_t nbytes, c10::Device device, bool passes);
  Result<at::Tensor> acquire_output(
      int64_t numel,
      c10::ScalarType dtype,
      c10::Device device,
      bool passes);

  // The end of a call: with shared arenas, waits until no peer reads what lies
  // in this rank's memory; else does nothing.
  Status leave();

  Counters counters() const;

  // After a call broke off: world size 1 forgets transfers under way; with
  // peers the sequence of collectives is broken, and the engine is poisoned.
  void abandon(const std::string& reason);

  // A peer has failed: what waits for it over a process group, now or later,
  // fails with the reason. Does not wait for a call that another thread is in.
  void stop_waiting(const std::string& reason);

  // Drops transfers in flight, arenas and pool. Later calls fail. Idempotent.
  void close();

 private:
  struct Gather;
  struct Reduce;

  Status usable() const;
  Status poison(
      const char* operation,
      const std::string& label,
      const std::string& reason);
  Result<Gather*> find_gather(int id) const;
  Result<Reduce*> find_reduce(int id) const;
  Result<Arena*> find_arena(int id, const std::string& label) const;
  // Nothing is under way in it, and nothing is known to lie in it from here on.
  Status leave_arena(int id);
  // Of an arena, which is allocated and counted where it is not there yet.
  Result<at::Tensor> slice(
      Arena& arena,
      int64_t offset,
      int64_t numel,
      c10::ScalarType dtype);
  Status build(Gather& gather);
  Status build_quantised(Gather& gather, Arena& staging);
  Status unpack(Gather& gather);
  Status build(Reduce& reduce);
  Status start_local(Gather& gather);
  Status start_collective(Gather& gather);
  void finish_local(Reduce& reduce);
  Status start_collective(Reduce& reduce);
  void finish_collective(Reduce& reduce);
  Status start_direct(Gather& gather);
  Status start_direct(Reduce& reduce);
  Status finish_direct(Reduce& reduce);
  Recycler& pool(bool passes) {
    return passes ? passing_ : resting_;
  }

  const std::unique_ptr<Transport> transport_;
  const int rank_;
  const int world_;
  const EngineOptions options_;
  const std::unique_ptr<Direct> direct_;  // null without PeerMemory

  mutable std::mutex mutex_;  // guards all that follows
  bool closed_ = false;
  std::optional<std::string> poison_;
  std::vector<std::shared_ptr<Arena>> arenas_;
  std::vector<bool> shared_;  // which of them peers read
  std::vector<std::unique_ptr<Gather>> gathers_;
  std::vector<std::unique_ptr<Reduce>> reduces_;
  // What stays until the next step and what is gone in a moment never share a
  // pool: the one would keep memory that the other could use.
  Recycler resting_;
  Recycler passing_{0};
  Counters counters_;
};

}  // namespace zero
