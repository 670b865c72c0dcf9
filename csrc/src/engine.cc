#include "engine_state.h"

namespace zero {

// Dropping a tensor that Python knows takes the GIL, whose holder may be waiting
// for mutex_. So what an operation lets go of dies after the lock is released:
// wherever a transfer ends, `dropped` is declared before the lock.

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
  resting_.clear();
  passing_.clear();
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
    transport_->give_up(*poison_);
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
  arenas_.push_back(std::make_shared<Arena>(nbytes, device));
  shared_.push_back(false);
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
  arenas_.push_back(std::make_shared<Arena>(
      nbytes, c10::Device(at::kCPU), [peers, space](int64_t size) {
        return peers->block(space, size);
      }));
  shared_.push_back(true);
  counters_.shared_bytes += nbytes;
  return static_cast<int>(arenas_.size()) - 1;
}

Result<Tensor> Engine::slice(
    Arena& arena,
    int64_t offset,
    int64_t numel,
    c10::ScalarType dtype) {
  const bool there = arena.allocated();
  auto part = arena.slice(offset, numel, dtype);
  if (!there && arena.allocated()) {
    counters_.arena_allocations += 1;
  }
  return part;
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
  ZERO_RETURN_IF_ERROR(leave_arena(id));
  if (shared_[static_cast<size_t>(id)]) {
    counters_.shared_bytes += nbytes - old.nbytes();
  }
  arenas_[static_cast<size_t>(id)] =
      std::make_shared<Arena>(nbytes, old.device(), old.source());
  return true;
}

Status Engine::place_arena(int id, std::shared_ptr<Arena> arena) {
  const std::lock_guard lock(mutex_);
  if (!usable().ok()) {
    return {};  // it transfers nothing any more
  }
  ZERO_RETURN_IF_ERROR(find_arena(id, "place").status());
  if (shared_[static_cast<size_t>(id)]) {
    return Status::error("what peers read cannot lie in another arena");
  }
  ZERO_RETURN_IF_ERROR(leave_arena(id));
  arenas_[static_cast<size_t>(id)] = std::move(arena);
  return {};
}

Status Engine::leave_arena(int id) {
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
          std::string("its arena cannot change while ") + gather->state_name());
    }
  }
  for (const auto& reduce : reduces_) {
    if (uses(reduce->spec) && reduce->state != Reduce::State::kIdle) {
      return misuse(
          "reduce", reduce->spec.label,
          std::string("its arena cannot change while ") + reduce->state_name());
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
  return {};
}

void Engine::abandon(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  if (closed_ || poison_) {
    return;
  }
  if (world_ > 1) {
    poison_ = "an earlier call of the model broke off on rank " +
        std::to_string(rank_) + " of " + std::to_string(world_) + ": " + reason;
    transport_->give_up(reason);
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

void Engine::stop_waiting(const std::string& reason) {
  transport_->stop_waiting(reason);
}

Status Engine::expect_output(
    int64_t nbytes,
    c10::Device device,
    bool passes) {
  const std::lock_guard lock(mutex_);
  ZERO_RETURN_IF_ERROR(usable());
  pool(passes).expect(nbytes, device);
  return {};
}

Result<Tensor> Engine::acquire_output(
    int64_t numel,
    c10::ScalarType dtype,
    c10::Device device,
    bool passes) {
  const std::lock_guard lock(mutex_);
  ZERO_RETURN_IF_ERROR(usable());
  return guarded([&]() -> Result<Tensor> {
    return pool(passes).acquire(at::IntArrayRef{numel}, dtype, device);
  });
}

void Engine::trim(int64_t nbytes) {
  std::vector<c10::Storage> dropped[2];  // freed when the lock is
  const std::lock_guard lock(mutex_);
  dropped[0] = resting_.trim(nbytes);
  dropped[1] = passing_.trim(0);
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
  for (size_t id = 0; id < arenas_.size(); ++id) {
    if (!shared_[id]) {
      all.arena_bytes += arenas_[id]->allocated() ? arenas_[id]->nbytes() : 0;
      all.arena_bytes_planned += arenas_[id]->nbytes();
    }
  }
  all.allocations =
      all.arena_allocations + resting_.allocations() + passing_.allocations();
  all.recycled = resting_.recycled() + passing_.recycled();
  all.scratch_bytes = transport_->scratch_bytes();
  return all;
}

}  // namespace zero
