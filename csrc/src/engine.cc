#include "zero/engine.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>
#include <type_traits>

#include "zero/sum.h"

namespace zero {
namespace {

using at::Tensor;

// Runs `body` below autograd (what the engine moves is data, not a graph) and
// turns what torch throws into a Status.
template <typename Body>
std::invoke_result_t<Body> guarded(Body&& body) {
  try {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return std::forward<Body>(body)();
  } catch (const c10::Error& error) {
    return Status::error(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return Status::error(error.what());
  }
}

std::string describe(const char* operation, const std::string& label) {
  return std::string(operation) + " '" + label + "'";
}

Status misuse(
    const char* operation,
    const std::string& label,
    const std::string& problem) {
  return Status::error(describe(operation, label) + ": " + problem);
}

int64_t product(const std::vector<int64_t>& sizes, size_t begin = 0) {
  int64_t result = 1;
  for (size_t i = begin; i < sizes.size(); ++i) {
    result *= sizes[i];
  }
  return result;
}

int64_t bytes_of(int64_t numel, c10::ScalarType dtype) {
  return numel * static_cast<int64_t>(c10::elementSize(dtype));
}

char* address(const Tensor& tensor) {
  return static_cast<char*>(tensor.mutable_data_ptr());
}

const char* const_address(const Tensor& tensor) {
  return static_cast<const char*>(tensor.const_data_ptr());
}

// Same elements in the same order: a cast or a plain copy. memcpy skips a
// microsecond of dispatch, which is what small parameters cost.
void copy_flat(const Tensor& to, const Tensor& from) {
  if (to.is_cpu() && from.is_cpu() &&
      to.scalar_type() == from.scalar_type()) {
    if (to.numel() > 0) {
      std::memcpy(address(to), const_address(from), to.nbytes());
    }
    return;
  }
  to.copy_(from, /*non_blocking=*/true);
}

Status check_input(
    const Tensor& tensor,
    c10::Device device,
    const char* what,
    size_t index) {
  const std::string name = std::string(what) + " " + std::to_string(index);
  if (!tensor.defined()) {
    return Status::error(name + " is missing");
  }
  if (tensor.layout() != at::kStrided || !tensor.has_storage()) {
    return Status::error(
        name + " is not a plain tensor (of a DTensor, pass the local tensor)");
  }
  if (tensor.device() != device) {
    return Status::error(
        name + " is on " + tensor.device().str() + ", expected " +
        device.str());
  }
  return {};
}

// Where nothing of a bucket needs an arena (world size 1), inputs may lie
// anywhere, but all in one place.
c10::Device device_of(const std::vector<Tensor>& tensors, c10::Device fallback) {
  return tensors.empty() || !tensors.front().defined()
      ? fallback
      : tensors.front().device();
}

}  // namespace

struct Engine::Gather {
  enum class State { kIdle, kStarted, kWaiting, kReady };

  explicit Gather(GatherSpec given) : spec(std::move(given)) {
    for (const GatherParam& param : spec.params) {
      total += param.chunk_numel;
    }
  }

  GatherSpec spec;
  int64_t total = 0;  // S
  int direct = -1;  // operation of Direct, where the slots are shared
  State state = State::kIdle;

  // Tensors over the arena, made once by build().
  bool built = false;
  Tensor staging_in;  // [S]
  Tensor staging_out;  // [W * S]
  std::vector<Tensor> in_slots;  // of staging_in, one a parameter
  std::vector<Tensor> from_rows;  // [W, chunk] of staging_out
  std::vector<Tensor> to_rows;  // [W, chunk] of the slot
  std::vector<Tensor> slots;  // [W * chunk]
  std::vector<Tensor> full;  // `sizes`, over the slot

  // Of the transfer under way.
  std::vector<Tensor> inputs;
  std::vector<Tensor> results;
  std::unique_ptr<Handle> handle;

  const char* state_name() const {
    switch (state) {
      case State::kIdle:
        return "it was not started";
      case State::kStarted:
        return "it is in flight";
      case State::kWaiting:
        return "another thread waits for it";
      case State::kReady:
        return "it was not released";
    }
    return "";
  }

  void drop() {
    handle.reset();
    inputs.clear();
    results.clear();
    for (auto* tensors : {&in_slots, &from_rows, &to_rows, &slots, &full}) {
      tensors->clear();
    }
    staging_in.reset();
    staging_out.reset();
    built = false;
  }
};

struct Engine::Reduce {
  enum class State { kIdle, kStarted, kWaiting };

  // Where a parameter's gradient goes in the rank-major staging.
  struct Place {
    int64_t offset = 0;  // of its chunk in a rank's part
    int64_t full_ranks = 0;  // ranks whose chunk has no padding
    int64_t tail_rows = 0;  // rows in the chunk after those
    Tensor full;  // [full_ranks, chunk_rows, ...] in staging
    Tensor tail;  // [tail_rows, ...] in staging
    std::vector<Tensor> padding;
  };

  explicit Reduce(ReduceSpec given) : spec(std::move(given)) {
    for (const ReduceParam& param : spec.params) {
      total += param.chunk_numel;
    }
  }

  ReduceSpec spec;
  int64_t total = 0;  // S
  int direct = -1;  // operation of Direct, where the staging is shared
  State state = State::kIdle;

  bool built = false;
  Tensor staging_in;  // sharded [W * S], replicated [S]
  Tensor staging_out;  // [S]; replicated: the same as staging_in
  std::vector<Place> places;
  std::vector<Tensor> out_slots;  // of staging_out, one a parameter
  Tensor divisor;  // see divide()

  std::vector<Tensor> inputs;
  bool copied = false;  // all of inputs, by the start
  std::vector<Tensor> results;  // those that exist before the wait
  std::unique_ptr<Handle> handle;

  const char* state_name() const {
    switch (state) {
      case State::kIdle:
        return "it was not started";
      case State::kStarted:
        return "it is in flight";
      case State::kWaiting:
        return "another thread waits for it";
    }
    return "";
  }

  void drop() {
    handle.reset();
    inputs.clear();
    results.clear();
    places.clear();
    out_slots.clear();
    staging_in.reset();
    staging_out.reset();
    divisor.reset();
    built = false;
  }

  // out = in / divisor, in the dtype of the arithmetic; in place if out is in.
  // A tensor as divisor, made once: CUDA multiplies by the reciprocal of a host
  // scalar, which is another number for a divisor such as 3, and on CPU a scalar
  // would be wrapped in a new tensor each time.
  void divide(const Tensor& in, Tensor out) {
    if (!divisor.defined()) {
      const auto options = in.options();
      divisor = at::full({}, spec.divisor, options);
      if (in.element_size() == 2 &&
          at::full({}, spec.divisor, options.device(at::kCPU))
                  .item<double>() != spec.divisor) {
        // Not a bfloat16 or half (257, say). A CPU tensor divides in float.
        divisor = at::full(
            {}, spec.divisor, at::TensorOptions(at::kFloat));
      }
    }
    at::div_out(out, in, divisor);
  }
};

Engine::Engine(
    std::unique_ptr<Transport> transport,
    int rank,
    int world,
    EngineOptions options)
    : transport_(std::move(transport)),
      rank_(rank),
      world_(world),
      options_(options),
      direct_(
          transport_->peers() != nullptr
              ? std::make_unique<Direct>(*transport_->peers())
              : nullptr) {}

Engine::~Engine() {
  close();
}

void Engine::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  // A thread may be inside a wait and look at its operation afterwards: empty
  // the operations, do not destroy them.
  for (const auto& gather : gathers_) {
    gather->drop();
  }
  for (const auto& reduce : reduces_) {
    reduce->drop();
  }
  if (direct_) {
    transport_->peers()->close();
    direct_->clear();
  }
  arenas_.clear();
  recycler_.clear();
}

Status Engine::usable() const {
  if (poison_) {
    return Status::error(*poison_);
  }
  if (closed_) {
    return Status::error("the engine is closed");
  }
  return {};
}

Status Engine::poison(
    const char* operation,
    const std::string& label,
    const std::string& reason) {
  if (!poison_) {
    poison_ = describe(operation, label) + " failed on rank " +
        std::to_string(rank_) + " of " + std::to_string(world_) + " (" +
        transport_->name() + "): " + reason;
    if (direct_) {
      transport_->peers()->give_up(*poison_);
    }
  }
  return Status::error(*poison_);
}

Result<Engine::Gather*> Engine::find_gather(int id) const {
  if (id < 0 || static_cast<size_t>(id) >= gathers_.size()) {
    return Status::error("no gather has the number " + std::to_string(id));
  }
  return gathers_[static_cast<size_t>(id)].get();
}

Result<Engine::Reduce*> Engine::find_reduce(int id) const {
  if (id < 0 || static_cast<size_t>(id) >= reduces_.size()) {
    return Status::error("no reduce has the number " + std::to_string(id));
  }
  return reduces_[static_cast<size_t>(id)].get();
}

Result<Arena*> Engine::find_arena(int id, const std::string& label) const {
  if (id < 0 || static_cast<size_t>(id) >= arenas_.size()) {
    return Status::error(
        "'" + label + "': no arena has the number " + std::to_string(id));
  }
  return arenas_[static_cast<size_t>(id)].get();
}

Result<int> Engine::add_arena(int64_t nbytes, c10::Device device) {
  const std::lock_guard lock(mutex_);
  ZERO_RETURN_IF_ERROR(usable());
  if (nbytes < 0) {
    return Status::error("an arena cannot have a negative size");
  }
  arenas_.push_back(std::make_unique<Arena>(nbytes, device));
  shared_.push_back(false);
  counters_.arena_bytes_planned += nbytes;
  return static_cast<int>(arenas_.size()) - 1;
}

Result<int> Engine::add_shared_arena(int64_t nbytes, PeerMemory::Space space) {
  const std::lock_guard lock(mutex_);
  ZERO_RETURN_IF_ERROR(usable());
  PeerMemory* peers = transport_->peers();
  if (peers == nullptr || nbytes < 0) {
    return Status::error(
        nbytes < 0 ? "an arena cannot have a negative size"
                   : "ranks cannot read each other's memory over " +
                transport_->name());
  }
  arenas_.push_back(std::make_unique<Arena>(
      nbytes, c10::Device(at::kCPU), [peers, space](int64_t size) {
        return peers->block(space, size);
      }));
  shared_.push_back(true);
  counters_.shared_bytes += nbytes;
  return static_cast<int>(arenas_.size()) - 1;
}

Result<bool> Engine::grow_arena(int id, int64_t nbytes) {
  const std::lock_guard lock(mutex_);
  ZERO_RETURN_IF_ERROR(usable());
  auto found = find_arena(id, "grow");
  ZERO_RETURN_IF_ERROR(found.status());
  const Arena& old = *found.value();
  if (nbytes <= old.nbytes()) {
    return false;
  }
  const auto uses = [&](const auto& spec) {
    if constexpr (requires { spec.staging_arena; }) {
      return spec.arena == id || spec.staging_arena == id;
    } else {
      return spec.arena == id;
    }
  };
  for (const auto& gather : gathers_) {
    if (uses(gather->spec) && gather->state != Gather::State::kIdle) {
      return misuse(
          "gather", gather->spec.label,
          std::string("its arena cannot grow while ") + gather->state_name());
    }
  }
  for (const auto& reduce : reduces_) {
    if (uses(reduce->spec) && reduce->state != Reduce::State::kIdle) {
      return misuse(
          "reduce", reduce->spec.label,
          std::string("its arena cannot grow while ") + reduce->state_name());
    }
  }
  for (const auto& gather : gathers_) {
    if (uses(gather->spec)) {
      gather->drop();
    }
  }
  for (const auto& reduce : reduces_) {
    if (uses(reduce->spec)) {
      reduce->drop();
    }
  }
  if (shared_[static_cast<size_t>(id)]) {
    counters_.shared_bytes += nbytes - old.nbytes();
  } else {
    if (old.allocated()) {
      counters_.arena_bytes -= old.nbytes();
    }
    counters_.arena_bytes_planned += nbytes - old.nbytes();
  }
  arenas_[static_cast<size_t>(id)] =
      std::make_unique<Arena>(nbytes, old.device(), old.source());
  return true;
}

void Engine::abandon(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (closed_ || poison_) {
    return;
  }
  if (world_ > 1) {
    poison_ = "an earlier call of the model broke off on rank " +
        std::to_string(rank_) + " of " + std::to_string(world_) + ": " + reason;
    if (direct_) {
      transport_->peers()->give_up(reason);
    }
    return;
  }
  for (const auto& gather : gathers_) {
    gather->inputs.clear();
    gather->results.clear();
    gather->handle.reset();
    gather->state = Gather::State::kIdle;
  }
  for (const auto& reduce : reduces_) {
    reduce->inputs.clear();
    reduce->results.clear();
    reduce->handle.reset();
    reduce->state = Reduce::State::kIdle;
  }
}

Result<int> Engine::add_gather(GatherSpec spec) {
  const std::lock_guard lock(mutex_);
  ZERO_RETURN_IF_ERROR(usable());
  const auto bad = [&](const std::string& problem) {
    return misuse("gather", spec.label, problem);
  };
  if (spec.staging_arena < 0) {
    spec.staging_arena = spec.arena;
  }
  auto arena = find_arena(spec.arena, spec.label);
  ZERO_RETURN_IF_ERROR(arena.status());
  auto staging_arena = find_arena(spec.staging_arena, spec.label);
  ZERO_RETURN_IF_ERROR(staging_arena.status());
  if (spec.params.empty()) {
    return bad("it has no parameters");
  }
  std::vector<std::pair<int64_t, int64_t>> ranges;  // bytes, of what it writes
  int64_t total = 0;
  for (const GatherParam& param : spec.params) {
    if (param.chunk_numel < 0 ||
        product(param.sizes) > world_ * param.chunk_numel) {
      return bad(
          "chunks of " + std::to_string(param.chunk_numel) + " elements on " +
          std::to_string(world_) + " ranks do not hold " +
          std::to_string(product(param.sizes)) + " elements");
    }
    total += param.chunk_numel;
    if (world_ == 1) {
      continue;  // needs a slot only for a cast; checked where it is made
    }
    const int64_t numel = world_ * param.chunk_numel;
    if (auto fits = arena.value()->check(param.out_offset, numel, spec.dtype);
        !fits.ok()) {
      return bad(fits.message());
    }
    ranges.emplace_back(
        param.out_offset, param.out_offset + bytes_of(numel, spec.dtype));
  }
  const bool shared = shared_[static_cast<size_t>(spec.arena)];
  if (shared) {
    spec.staging_offset = -1;  // written and read in place
  }
  if (world_ > 1 && !shared && spec.params.size() > 1 &&
      spec.staging_offset < 0) {
    return bad("several parameters need a staging area");
  }
  if (world_ > 1 && spec.staging_offset >= 0) {
    const int64_t numel =
        spec.params.size() > 1 ? total * (world_ + 1) : total;
    if (auto fits = staging_arena.value()->check(
            spec.staging_offset, numel, spec.dtype);
        !fits.ok()) {
      return bad("staging: " + fits.message());
    }
    if (spec.staging_arena == spec.arena) {
      ranges.emplace_back(
          spec.staging_offset,
          spec.staging_offset + bytes_of(numel, spec.dtype));
    }
  }
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].first < ranges[i - 1].second) {
      return bad(
          "its slots overlap at offset " + std::to_string(ranges[i].first));
    }
  }
  gathers_.push_back(std::make_unique<Gather>(std::move(spec)));
  if (Gather& gather = *gathers_.back(); shared && world_ > 1) {
    gather.direct =
        direct_->add(gather.spec.arena, std::move(ranges), gather.spec.label);
  }
  return static_cast<int>(gathers_.size()) - 1;
}

Result<int> Engine::add_reduce(ReduceSpec spec) {
  const std::lock_guard lock(mutex_);
  ZERO_RETURN_IF_ERROR(usable());
  const auto bad = [&](const std::string& problem) {
    return misuse("reduce", spec.label, problem);
  };
  auto arena = find_arena(spec.arena, spec.label);
  ZERO_RETURN_IF_ERROR(arena.status());
  if (spec.params.empty()) {
    return bad("it has no parameters");
  }
  if (!c10::isFloatingType(spec.dtype) ||
      !c10::isFloatingType(spec.out_dtype)) {
    return bad("gradients are floating point");
  }
  if (!(spec.divisor > 0.0) || !std::isfinite(spec.divisor)) {
    return bad("the divisor must be positive");
  }
  int64_t total = 0;
  for (const ReduceParam& param : spec.params) {
    const int64_t numel = product(param.sizes);
    if (spec.replicated) {
      if (numel != param.chunk_numel) {
        return bad(
            "a replicated gradient of " + std::to_string(numel) +
            " elements was given as " + std::to_string(param.chunk_numel));
      }
    } else {
      const int64_t row = param.sizes.empty() ? 0 : product(param.sizes, 1);
      if (row <= 0 || param.chunk_numel <= 0 || param.chunk_numel % row != 0 ||
          world_ * param.chunk_numel < numel) {
        return bad(
            "chunks of " + std::to_string(param.chunk_numel) +
            " elements do not cut " + std::to_string(numel) +
            " elements by rows over " + std::to_string(world_) + " ranks");
      }
    }
    total += param.chunk_numel;
  }
  const bool shared = shared_[static_cast<size_t>(spec.arena)];
  int64_t whole = 0;  // elements of the gradients themselves
  for (const ReduceParam& param : spec.params) {
    whole += product(param.sizes);
  }
  if (world_ > 1 && shared) {
    if (auto fits =
            arena.value()->check(spec.staging_offset, whole, spec.dtype);
        !fits.ok()) {
      return bad("staging: " + fits.message());
    }
  } else if (world_ > 1) {
    if (spec.staging_offset >= 0) {
      const int64_t numel = spec.replicated ? total : total * (world_ + 1);
      if (auto fits =
              arena.value()->check(spec.staging_offset, numel, spec.dtype);
          !fits.ok()) {
        return bad("staging: " + fits.message());
      }
    } else if (spec.params.size() > 1 || spec.dtype != spec.out_dtype) {
      return bad("several parameters or a cast need a staging area");
    }
  }
  for (const ReduceParam& param : spec.params) {
    recycler_.expect(
        bytes_of(param.chunk_numel, spec.out_dtype), arena.value()->device());
  }
  reduces_.push_back(std::make_unique<Reduce>(std::move(spec)));
  if (Reduce& reduce = *reduces_.back(); shared && world_ > 1) {
    const int64_t begin = reduce.spec.staging_offset;
    reduce.direct = direct_->add(
        reduce.spec.arena,
        {{begin, begin + bytes_of(whole, reduce.spec.dtype)}},
        reduce.spec.label);
  }
  return static_cast<int>(reduces_.size()) - 1;
}

Status Engine::build(Gather& gather) {
  if (gather.built) {
    return {};
  }
  const GatherSpec& spec = gather.spec;
  auto found = find_arena(spec.arena, spec.label);
  ZERO_RETURN_IF_ERROR(found.status());
  Arena& arena = *found.value();
  auto other = find_arena(spec.staging_arena, spec.label);
  ZERO_RETURN_IF_ERROR(other.status());
  Arena& staging = *other.value();
  const bool allocates = gather.direct < 0 && !arena.allocated();
  const bool staging_allocates =
      &staging != &arena && !staging.allocated() && spec.staging_offset >= 0;

  for (const GatherParam& param : spec.params) {
    auto slot = arena.slice(
        param.out_offset, world_ * param.chunk_numel, spec.dtype);
    ZERO_RETURN_IF_ERROR(slot.status());
    gather.slots.push_back(slot.value());
    gather.full.push_back(
        slot.value().narrow(0, 0, product(param.sizes)).view(param.sizes));
  }
  if (world_ > 1 && spec.staging_offset >= 0) {
    auto in = staging.slice(spec.staging_offset, gather.total, spec.dtype);
    ZERO_RETURN_IF_ERROR(in.status());
    gather.staging_in = in.value();
  }
  if (gather.direct >= 0) {
    for (size_t i = 0; i < spec.params.size(); ++i) {
      const int64_t chunk = spec.params[i].chunk_numel;
      gather.in_slots.push_back(
          gather.slots[i].narrow(0, rank_ * chunk, chunk));
    }
  } else if (world_ > 1 && spec.params.size() > 1) {
    auto out = staging.slice(
        spec.staging_offset + bytes_of(gather.total, spec.dtype),
        world_ * gather.total,
        spec.dtype);
    ZERO_RETURN_IF_ERROR(out.status());
    gather.staging_out = out.value();
    int64_t offset = 0;
    for (size_t i = 0; i < spec.params.size(); ++i) {
      const int64_t chunk = spec.params[i].chunk_numel;
      gather.in_slots.push_back(gather.staging_in.narrow(0, offset, chunk));
      gather.from_rows.push_back(
          gather.staging_out.view({world_, gather.total})
              .narrow(1, offset, chunk));
      gather.to_rows.push_back(gather.slots[i].view({world_, chunk}));
      offset += chunk;
    }
  } else if (gather.staging_in.defined()) {
    gather.in_slots.push_back(gather.staging_in);
  }

  if (allocates) {
    counters_.arena_bytes += arena.nbytes();
    counters_.allocations += 1;
  }
  if (staging_allocates && staging.allocated()) {
    counters_.arena_bytes += staging.nbytes();
    counters_.allocations += 1;
  }
  gather.built = true;
  return {};
}

Status Engine::build(Reduce& reduce) {
  if (reduce.built || reduce.spec.staging_offset < 0) {
    return {};
  }
  const ReduceSpec& spec = reduce.spec;
  auto found = find_arena(spec.arena, spec.label);
  ZERO_RETURN_IF_ERROR(found.status());
  Arena& arena = *found.value();
  if (reduce.direct >= 0) {
    int64_t offset = spec.staging_offset;
    for (const ReduceParam& param : spec.params) {
      auto slot = arena.slice(offset, product(param.sizes), spec.dtype);
      ZERO_RETURN_IF_ERROR(slot.status());
      reduce.out_slots.push_back(slot.value().view(param.sizes));
      offset += bytes_of(product(param.sizes), spec.dtype);
    }
    reduce.built = true;
    return {};
  }
  const bool allocates = !arena.allocated();

  const int64_t total = reduce.total;
  const int64_t in_numel = spec.replicated ? total : world_ * total;
  auto in = arena.slice(spec.staging_offset, in_numel, spec.dtype);
  ZERO_RETURN_IF_ERROR(in.status());
  reduce.staging_in = in.value();
  if (spec.replicated) {
    reduce.staging_out = reduce.staging_in;
  } else {
    auto out = arena.slice(
        spec.staging_offset + bytes_of(in_numel, spec.dtype),
        total,
        spec.dtype);
    ZERO_RETURN_IF_ERROR(out.status());
    reduce.staging_out = out.value();
  }

  int64_t offset = 0;
  for (const ReduceParam& param : spec.params) {
    const int64_t chunk = param.chunk_numel;
    reduce.out_slots.push_back(reduce.staging_out.narrow(0, offset, chunk));
    if (!spec.replicated) {
      Reduce::Place place;
      place.offset = offset;
      const int64_t rows = param.sizes[0];
      const int64_t row = product(param.sizes, 1);
      const int64_t chunk_rows = chunk / row;
      place.full_ranks = std::min<int64_t>(rows / chunk_rows, world_);
      place.tail_rows = rows - place.full_ranks * chunk_rows;

      // The chunks of whole ranks, as [ranks, rows, ...] inside the rank-major
      // staging, and the strides of a row, which both share.
      std::vector<int64_t> sizes{place.full_ranks, chunk_rows};
      std::vector<int64_t> strides{total, row};
      std::vector<int64_t> tail_sizes{place.tail_rows};
      std::vector<int64_t> tail_strides{row};
      int64_t stride = row;
      for (size_t dim = 1; dim < param.sizes.size(); ++dim) {
        stride /= param.sizes[dim];
        for (auto* list : {&sizes, &tail_sizes}) {
          list->push_back(param.sizes[dim]);
        }
        for (auto* list : {&strides, &tail_strides}) {
          list->push_back(stride);
        }
      }
      const Tensor& staging = reduce.staging_in;
      place.full = staging.as_strided(sizes, strides, offset);
      int64_t next_rank = place.full_ranks;
      if (place.tail_rows > 0) {
        const int64_t begin = offset + next_rank * total;
        const int64_t filled = place.tail_rows * row;
        place.tail = staging.as_strided(tail_sizes, tail_strides, begin);
        place.padding.push_back(
            staging.narrow(0, begin + filled, chunk - filled));
        next_rank += 1;
      }
      if (next_rank < world_) {
        place.padding.push_back(staging.as_strided(
            {world_ - next_rank, chunk}, {total, 1}, offset + next_rank * total));
      }
      reduce.places.push_back(std::move(place));
    }
    offset += chunk;
  }

  if (allocates) {
    counters_.arena_bytes += arena.nbytes();
    counters_.allocations += 1;
  }
  reduce.built = true;
  return {};
}

// Dropping a tensor that Python knows takes the GIL, whose holder may be waiting
// for mutex_. So what an operation lets go of dies after the lock is released:
// `dropped` is declared before the lock in each of the calls below.

Status Engine::gather_start(int id, std::vector<Tensor> shards) {
  std::vector<Tensor> dropped;
  const std::lock_guard lock(mutex_);
  ZERO_RETURN_IF_ERROR(usable());
  auto found = find_gather(id);
  ZERO_RETURN_IF_ERROR(found.status());
  Gather& gather = *found.value();
  const GatherSpec& spec = gather.spec;
  if (gather.state != Gather::State::kIdle) {
    return misuse(
        "gather", spec.label,
        std::string("started again, but ") + gather.state_name());
  }
  if (shards.size() != spec.params.size()) {
    return misuse(
        "gather", spec.label,
        "got " + std::to_string(shards.size()) + " shards for " +
            std::to_string(spec.params.size()) + " parameters");
  }
  auto arena = find_arena(spec.arena, spec.label);
  ZERO_RETURN_IF_ERROR(arena.status());
  const c10::Device device =
      world_ == 1 ? device_of(shards, arena.value()->device())
                  : arena.value()->device();
  for (size_t i = 0; i < shards.size(); ++i) {
    if (auto fine = check_input(shards[i], device, "shard", i); !fine.ok()) {
      return misuse("gather", spec.label, fine.message());
    }
    if (shards[i].numel() != spec.params[i].chunk_numel ||
        !shards[i].is_contiguous()) {
      return misuse(
          "gather", spec.label,
          "shard " + std::to_string(i) + " must be contiguous and have " +
              std::to_string(spec.params[i].chunk_numel) +
              " elements, and has " + std::to_string(shards[i].numel()));
    }
  }

  gather.inputs = std::move(shards);
  Status started = guarded(
      [&] { return world_ == 1 ? start_local(gather) : start_collective(gather); });
  if (!started.ok()) {
    dropped.swap(gather.inputs);
    gather.results.clear();
    return poison_ ? started : misuse("gather", spec.label, started.message());
  }
  gather.state = Gather::State::kStarted;
  counters_.gathers += 1;
  return {};
}

Status Engine::start_local(Gather& gather) {
  const GatherSpec& spec = gather.spec;
  gather.results.clear();
  for (size_t i = 0; i < gather.inputs.size(); ++i) {
    const Tensor& shard = gather.inputs[i];
    const auto& sizes = spec.params[i].sizes;
    if (shard.scalar_type() == spec.dtype) {
      Tensor flat = shard.view({-1});
      gather.results.push_back(
          flat.narrow(0, 0, product(sizes)).view(sizes));
      continue;
    }
    ZERO_RETURN_IF_ERROR(build(gather));
    gather.slots[i].copy_(shard.view({-1}), /*non_blocking=*/true);
    gather.results.push_back(gather.full[i]);
  }
  return {};
}

Status Engine::start_collective(Gather& gather) {
  const GatherSpec& spec = gather.spec;
  ZERO_RETURN_IF_ERROR(build(gather));
  if (gather.direct >= 0) {
    return start_direct(gather);
  }
  Tensor in;
  Tensor out;
  if (spec.params.size() == 1) {
    const Tensor shard = gather.inputs[0].view({-1});
    out = gather.slots[0];
    if (shard.scalar_type() == spec.dtype) {
      in = shard;
    } else if (!gather.staging_in.defined()) {
      return Status::error("a cast needs a staging area");
    } else {
      in = gather.staging_in;
      in.copy_(shard, /*non_blocking=*/true);
    }
  } else {
    in = gather.staging_in;
    out = gather.staging_out;
    if (in.is_cpu()) {
      for (size_t i = 0; i < gather.inputs.size(); ++i) {
        copy_flat(gather.in_slots[i], gather.inputs[i].view({-1}));
      }
    } else {
      std::vector<Tensor> flat;
      flat.reserve(gather.inputs.size());
      for (const Tensor& shard : gather.inputs) {
        flat.push_back(shard.view({-1}));
      }
      at::_foreach_copy_(gather.in_slots, flat, /*non_blocking=*/true);
    }
  }
  gather.results = gather.full;
  if (gather.total == 0) {
    return {};  // on every rank alike: nothing to send
  }
  StartResult started = transport_->start_all_gather(in, out);
  if (!started.ok()) {
    return poison("gather", spec.label, started.status().message());
  }
  gather.handle = std::move(started.value());
  counters_.bytes_gathered += static_cast<int64_t>(out.nbytes());
  return {};
}

Result<std::vector<Tensor>> Engine::gather_wait(int id) {
  std::vector<Tensor> dropped;
  std::unique_lock lock(mutex_);
  ZERO_RETURN_IF_ERROR(usable());
  auto found = find_gather(id);
  ZERO_RETURN_IF_ERROR(found.status());
  Gather& gather = *found.value();
  if (gather.state != Gather::State::kStarted) {
    return misuse(
        "gather", gather.spec.label,
        std::string("waited for, but ") +
            (gather.state == Gather::State::kReady
                 ? "it was waited for already"
                 : gather.state_name()));
  }
  if (gather.handle || gather.direct >= 0) {
    gather.state = Gather::State::kWaiting;
    const std::unique_ptr<Handle> handle = std::move(gather.handle);
    lock.unlock();
    const Status done =
        handle ? handle->wait() : direct_->wait(gather.direct);
    lock.lock();
    if (!done.ok()) {
      return poison("gather", gather.spec.label, done.message());
    }
    if (closed_) {
      return usable();
    }
  }
  const Status copied = guarded([&]() -> Status {
    if (!gather.from_rows.empty() && world_ > 1) {
      if (!gather.staging_out.is_cpu()) {
        at::_foreach_copy_(
            gather.to_rows, gather.from_rows, /*non_blocking=*/true);
        return {};
      }
      for (size_t i = 0; i < gather.to_rows.size(); ++i) {
        const auto row = static_cast<size_t>(bytes_of(
            gather.spec.params[i].chunk_numel, gather.spec.dtype));
        const auto stride =
            static_cast<size_t>(bytes_of(gather.total, gather.spec.dtype));
        char* to = address(gather.slots[i]);
        const char* from = const_address(gather.from_rows[i]);
        for (int k = 0; row > 0 && k < world_; ++k) {
          std::memcpy(to, from, row);
          to += row;
          from += stride;
        }
      }
    }
    return {};
  });
  ZERO_RETURN_IF_ERROR(copied);
  dropped.swap(gather.inputs);
  gather.state = Gather::State::kReady;
  return gather.results;
}

Status Engine::release(int id) {
  std::vector<Tensor> dropped;
  const std::lock_guard lock(mutex_);
  ZERO_RETURN_IF_ERROR(usable());
  auto found = find_gather(id);
  ZERO_RETURN_IF_ERROR(found.status());
  Gather& gather = *found.value();
  if (gather.state != Gather::State::kReady) {
    return misuse(
        "gather", gather.spec.label,
        std::string("released, but ") + gather.state_name());
  }
  if (options_.scribble_on_release && gather.built && gather.direct < 0) {
    const Status filled = guarded([&]() -> Status {
      for (const Tensor& slot : gather.slots) {
        slot.view(at::kByte).fill_(0xFF);
      }
      return {};
    });
    ZERO_RETURN_IF_ERROR(filled);
  }
  dropped.swap(gather.results);
  if (gather.direct >= 0) {
    direct_->release(gather.direct);
  }
  gather.state = Gather::State::kIdle;
  return {};
}

Tensor Engine::acquire(
    at::IntArrayRef sizes,
    c10::ScalarType dtype,
    c10::Device device) {
  return recycler_.acquire(sizes, dtype, device);
}

Status Engine::reduce_start(int id, std::vector<Tensor> grads) {
  std::vector<Tensor> dropped;
  const std::lock_guard lock(mutex_);
  ZERO_RETURN_IF_ERROR(usable());
  auto found = find_reduce(id);
  ZERO_RETURN_IF_ERROR(found.status());
  Reduce& reduce = *found.value();
  const ReduceSpec& spec = reduce.spec;
  if (reduce.state != Reduce::State::kIdle) {
    return misuse(
        "reduce", spec.label,
        std::string("started again, but ") + reduce.state_name());
  }
  if (grads.size() != spec.params.size()) {
    return misuse(
        "reduce", spec.label,
        "got " + std::to_string(grads.size()) + " gradients for " +
            std::to_string(spec.params.size()) + " parameters");
  }
  auto arena = find_arena(spec.arena, spec.label);
  ZERO_RETURN_IF_ERROR(arena.status());
  const c10::Device device =
      world_ == 1 ? device_of(grads, arena.value()->device())
                  : arena.value()->device();
  for (size_t i = 0; i < grads.size(); ++i) {
    if (auto fine = check_input(grads[i], device, "gradient", i); !fine.ok()) {
      return misuse("reduce", spec.label, fine.message());
    }
    if (grads[i].sizes() != at::IntArrayRef(spec.params[i].sizes)) {
      return misuse(
          "reduce", spec.label,
          "gradient " + std::to_string(i) + " has the wrong shape");
    }
    if (!grads[i].is_floating_point()) {
      return misuse(
          "reduce", spec.label,
          "gradient " + std::to_string(i) + " is not floating point");
    }
  }

  reduce.inputs = std::move(grads);
  if (world_ > 1) {
    Status started = guarded([&] { return start_collective(reduce); });
    if (reduce.copied || !started.ok()) {
      // What was copied need not outlive this call. On an accelerator is only queued, on the stream that would reuse the memory.
      dropped.swap(reduce.inputs);
    }
    if (!started.ok()) {
      reduce.results.clear();
      return poison_ ? started : misuse("reduce", spec.label, started.message());
    }
  }
  reduce.state = Reduce::State::kStarted;
  counters_.reduces += 1;
  return {};
}

Status Engine::start_collective(Reduce& reduce) {
  const ReduceSpec& spec = reduce.spec;
  ZERO_RETURN_IF_ERROR(build(reduce));
  if (reduce.direct >= 0) {
    return start_direct(reduce);
  }
  const bool lone = spec.params.size() == 1;
  const Tensor& first = reduce.inputs[0];
  reduce.copied = false;

  // A lone result of the right dtype needs no place in between: the transport
  // writes what the caller gets.
  Tensor out = reduce.staging_out;
  if (lone && spec.dtype == spec.out_dtype) {
    const ReduceParam& param = spec.params[0];
    out = spec.replicated
        ? acquire(param.sizes, spec.out_dtype, first.device()).view({-1})
        : acquire({param.chunk_numel}, spec.out_dtype, first.device());
    reduce.results = {out};
  }

  if (spec.replicated) {
    int64_t offset = 0;
    for (size_t i = 0; i < reduce.inputs.size(); ++i) {
      const int64_t numel = spec.params[i].chunk_numel;
      out.narrow(0, offset, numel)
          .view(spec.params[i].sizes)
          .copy_(reduce.inputs[i], /*non_blocking=*/true);
      offset += numel;
    }
    reduce.copied = true;
    if (reduce.total == 0) {
      return {};
    }
    StartResult started = transport_->start_all_reduce(out);
    if (!started.ok()) {
      return poison("reduce", spec.label, started.status().message());
    }
    reduce.handle = std::move(started.value());
    counters_.bytes_reduced += static_cast<int64_t>(out.nbytes());
    return {};
  }

  const bool even = first.numel() == world_ * spec.params[0].chunk_numel;
  Tensor in;
  if (lone && even && first.is_contiguous() &&
      first.scalar_type() == spec.dtype) {
    in = first.view({-1});
  } else if (!reduce.built) {
    return Status::error(
        "a gradient that is not contiguous, of another dtype or with rows that "
        "do not divide evenly needs a staging area");
  } else {
    in = reduce.staging_in;
    for (size_t i = 0; i < reduce.inputs.size(); ++i) {
      const Tensor& grad = reduce.inputs[i];
      const Reduce::Place& place = reduce.places[i];
      const ReduceParam& param = spec.params[i];
      for (const Tensor& padding : place.padding) {
        padding.zero_();
      }
      if (in.is_cpu() && grad.is_contiguous() &&
          grad.scalar_type() == spec.dtype) {
        const auto chunk =
            static_cast<size_t>(bytes_of(param.chunk_numel, spec.dtype));
        const auto stride =
            static_cast<size_t>(bytes_of(reduce.total, spec.dtype));
        char* to = address(in) + bytes_of(place.offset, spec.dtype);
        const char* from = const_address(grad);
        size_t left = grad.nbytes();
        while (left > 0) {
          const size_t piece = std::min(chunk, left);
          std::memcpy(to, from, piece);
          to += stride;
          from += piece;
          left -= piece;
        }
        continue;
      }
      const int64_t chunk_rows = param.chunk_numel / product(param.sizes, 1);
      const int64_t full_rows = place.full_ranks * chunk_rows;
      if (full_rows > 0) {
        // Splitting the first dimension is a view whatever the strides are.
        place.full.copy_(
            grad.narrow(0, 0, full_rows)
                .unflatten(0, {place.full_ranks, chunk_rows}),
            /*non_blocking=*/true);
      }
      if (place.tail_rows > 0) {
        place.tail.copy_(
            grad.narrow(0, full_rows, place.tail_rows), /*non_blocking=*/true);
      }
    }
    reduce.copied = true;
  }

  StartResult started = transport_->start_reduce_scatter(in, out);
  if (!started.ok()) {
    return poison("reduce", spec.label, started.status().message());
  }
  reduce.handle = std::move(started.value());
  counters_.bytes_reduced += static_cast<int64_t>(in.nbytes());
  return {};
}

Result<std::vector<Tensor>> Engine::reduce_wait(int id) {
  std::vector<Tensor> dropped;
  std::unique_lock lock(mutex_);
  ZERO_RETURN_IF_ERROR(usable());
  auto found = find_reduce(id);
  ZERO_RETURN_IF_ERROR(found.status());
  Reduce& reduce = *found.value();
  if (reduce.state != Reduce::State::kStarted) {
    return misuse(
        "reduce", reduce.spec.label,
        std::string("waited for, but ") + reduce.state_name());
  }
  if (reduce.handle || reduce.direct >= 0) {
    reduce.state = Reduce::State::kWaiting;
    const std::unique_ptr<Handle> handle = std::move(reduce.handle);
    lock.unlock();
    const Status done =
        handle ? handle->wait() : direct_->wait(reduce.direct);
    lock.lock();
    if (!done.ok()) {
      return poison("reduce", reduce.spec.label, done.message());
    }
    if (closed_) {
      return usable();
    }
  }
  reduce.state = Reduce::State::kIdle;
  const Status finished = guarded([&]() -> Status {
    if (reduce.direct >= 0) {
      return finish_direct(reduce);
    }
    if (world_ == 1) {
      finish_local(reduce);
    } else {
      finish_collective(reduce);
    }
    return {};
  });
  dropped.swap(reduce.inputs);
  std::vector<Tensor> results = std::move(reduce.results);
  reduce.results.clear();
  if (!finished.ok()) {
    return reduce.direct >= 0
        ? poison("reduce", reduce.spec.label, finished.message())
        : misuse("reduce", reduce.spec.label, finished.message());
  }
  return results;
}

void Engine::finish_collective(Reduce& reduce) {
  const ReduceSpec& spec = reduce.spec;
  const bool divides = spec.divisor != 1.0;
  if (!reduce.results.empty()) {  // written by the transport itself
    Tensor out = reduce.results[0];
    if (divides) {
      reduce.divide(out, out);
    }
    if (spec.replicated) {
      reduce.results[0] = out.view(spec.params[0].sizes);
    }
    return;
  }
  for (size_t i = 0; i < spec.params.size(); ++i) {
    const Tensor& sum = reduce.out_slots[i];
    const ReduceParam& param = spec.params[i];
    Tensor out = acquire({param.chunk_numel}, spec.out_dtype, sum.device());
    if (spec.out_dtype == spec.dtype && divides) {
      reduce.divide(sum, out);
    } else {
      if (divides) {
        reduce.divide(sum, sum);
      }
      out.copy_(sum, /*non_blocking=*/true);
    }
    reduce.results.push_back(spec.replicated ? out.view(param.sizes) : out);
  }
}

Status Engine::start_direct(Gather& gather) {
  std::vector<Direct::Copy> copies;
  copies.reserve(gather.inputs.size());
  for (size_t i = 0; i < gather.inputs.size(); ++i) {
    copies.push_back({gather.inputs[i].view({-1}), gather.in_slots[i]});
  }
  gather.results = gather.full;
  counters_.bytes_gathered +=
      bytes_of(world_ * gather.total, gather.spec.dtype);
  return direct_->start(gather.direct, std::move(copies), 0).status();
}

Status Engine::start_direct(Reduce& reduce) {
  std::vector<Direct::Copy> copies;
  copies.reserve(reduce.inputs.size());
  for (size_t i = 0; i < reduce.inputs.size(); ++i) {
    copies.push_back({reduce.inputs[i], reduce.out_slots[i]});
    counters_.bytes_reduced +=
        static_cast<int64_t>(reduce.out_slots[i].nbytes());
  }
  reduce.copied = true;  // or held by Direct until it is
  return direct_
      ->start(reduce.direct, std::move(copies), reduce.spec.staging_offset)
      .status();
}

// Every rank's gradients lie where they can be read: add up this rank's rows.
Status Engine::finish_direct(Reduce& reduce) {
  const ReduceSpec& spec = reduce.spec;
  PeerMemory& peers = *transport_->peers();
  const int64_t number = direct_->number(reduce.direct);
  int64_t whole = 0;
  for (const ReduceParam& param : spec.params) {
    whole += product(param.sizes);
  }
  std::vector<const char*> bases;
  for (int rank = 0; rank < world_; ++rank) {
    auto base = peers.published(rank, number, bytes_of(whole, spec.dtype));
    ZERO_RETURN_IF_ERROR(base.status());
    bases.push_back(static_cast<const char*>(base.value()));
  }
  int64_t offset = 0;  // elements
  for (const ReduceParam& param : spec.params) {
    const int64_t numel = product(param.sizes);
    Tensor out = acquire(
        {param.chunk_numel}, spec.out_dtype, c10::Device(at::kCPU));
    const int64_t begin =
        spec.replicated ? 0 : std::min(rank_ * param.chunk_numel, numel);
    const int64_t rows = std::min(param.chunk_numel, numel - begin);
    std::vector<const void*> parts;
    for (const char* base : bases) {
      parts.push_back(base + bytes_of(offset + begin, spec.dtype));
    }
    ZERO_RETURN_IF_ERROR(sum_parts(
        parts, spec.dtype, spec.divisor, out.narrow(0, 0, rows)));
    if (rows < param.chunk_numel) {
      out.narrow(0, rows, param.chunk_numel - rows).zero_();
    }
    reduce.results.push_back(spec.replicated ? out.view(param.sizes) : out);
    offset += numel;
  }
  direct_->release(reduce.direct);
  return {};
}

// One rank: the sum is the gradient. What is left is to flatten it, to divide
// it and to cast it, and often there is none of that to do.
void Engine::finish_local(Reduce& reduce) {
  const ReduceSpec& spec = reduce.spec;
  for (size_t i = 0; i < spec.params.size(); ++i) {
    const Tensor& grad = reduce.inputs[i];
    const ReduceParam& param = spec.params[i];
    const std::vector<int64_t> flat{param.chunk_numel};
    const auto& sizes = spec.replicated ? param.sizes : flat;
    const bool padded = !spec.replicated && grad.numel() != param.chunk_numel;
    if (grad.scalar_type() == spec.out_dtype && spec.divisor == 1.0 &&
        !padded && (spec.replicated || grad.is_contiguous())) {
      reduce.results.push_back(spec.replicated ? grad : grad.view(sizes));
      continue;
    }
    Tensor out = acquire(sizes, spec.out_dtype, grad.device());
    if (padded) {
      out.zero_();
    }
    Tensor full = out.view({-1}).narrow(0, 0, grad.numel()).view(param.sizes);
    if (spec.divisor == 1.0) {
      full.copy_(grad, /*non_blocking=*/true);
    } else if (spec.dtype == spec.out_dtype) {
      full.copy_(grad, /*non_blocking=*/true);
      reduce.divide(full, full);
    } else {
      Tensor wide = acquire(param.sizes, spec.dtype, grad.device());
      wide.copy_(grad, /*non_blocking=*/true);
      reduce.divide(wide, wide);
      full.copy_(wide, /*non_blocking=*/true);
    }
    reduce.results.push_back(out);
  }
}

Status Engine::leave() {
  std::unique_lock lock(mutex_);
  ZERO_RETURN_IF_ERROR(usable());
  if (!direct_) {
    return {};
  }
  lock.unlock();
  const Status left = transport_->peers()->leave();
  lock.lock();
  return left.ok() ? left : poison("the end of a call", "", left.message());
}

Counters Engine::counters() const {
  const std::lock_guard lock(mutex_);
  Counters all = counters_;
  all.allocations += recycler_.allocations();
  all.recycled = recycler_.recycled();
  all.scratch_bytes = transport_->scratch_bytes();
  return all;
}

}  // namespace zero
