// Gathers: full parameters out of every rank's chunks.
#include <ATen/ops/_foreach_copy.h>

#include <algorithm>

#include "engine_state.h"

namespace zero {
namespace {

// Whether chunks can travel packed, as the spec says.
Status check_quantised(const GatherSpec& spec, int world, bool shared) {
  if (!can_quantise_to(spec.wire) || !can_quantise_from(spec.dtype)) {
    return Status::error(
        std::string("weights of ") + c10::toString(spec.dtype) +
        " cannot travel in " + c10::toString(spec.wire));
  }
  if (world == 1 || shared) {
    return Status::error("nothing is sent that could travel quantised");
  }
  if (spec.staging_offset < 0 || spec.staging_offset % 4 != 0) {
    return Status::error(
        "quantised weights need a staging area, at a multiple of four bytes");
  }
  return {};
}

}  // namespace

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
  const bool quantised = spec.wire != c10::ScalarType::Undefined;
  if (quantised) {
    if (auto fine = check_quantised(spec, world_, shared); !fine.ok()) {
      return bad(fine.message());
    }
  }
  if (shared) {
    spec.staging_offset = -1;  // written and read in place
  }
  if (world_ > 1 && !shared && spec.params.size() > 1 &&
      spec.staging_offset < 0) {
    return bad("several parameters need a staging area");
  }
  if (world_ > 1 && spec.staging_offset >= 0) {
    const c10::ScalarType staged = quantised ? at::kByte : spec.dtype;
    const int64_t each = quantised ? Gather(spec).packed : total;
    const int64_t numel =
        quantised || spec.params.size() > 1 ? each * (world_ + 1) : each;
    if (auto fits = staging_arena.value()->check(
            spec.staging_offset, numel, staged);
        !fits.ok()) {
      return bad("staging: " + fits.message());
    }
    if (spec.staging_arena == spec.arena) {
      ranges.emplace_back(
          spec.staging_offset,
          spec.staging_offset + bytes_of(numel, staged));
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

  for (const GatherParam& param : spec.params) {
    auto slot = slice(
        arena, param.out_offset, world_ * param.chunk_numel, spec.dtype);
    ZERO_RETURN_IF_ERROR(slot.status());
    gather.slots.push_back(slot.value());
    gather.full.push_back(
        slot.value().narrow(0, 0, product(param.sizes)).view(param.sizes));
  }
  if (gather.quantised()) {
    ZERO_RETURN_IF_ERROR(build_quantised(gather, staging));
    gather.built = true;
    return {};
  }
  if (world_ > 1 && spec.staging_offset >= 0) {
    auto in = slice(staging, spec.staging_offset, gather.total, spec.dtype);
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
    auto out = slice(
        staging,
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

  gather.built = true;
  return {};
}

Status Engine::build_quantised(Gather& gather, Arena& staging) {
  const int64_t at = gather.spec.staging_offset;
  auto in = slice(staging, at, gather.packed, at::kByte);
  ZERO_RETURN_IF_ERROR(in.status());
  gather.staging_in = in.value();
  auto out =
      slice(staging, at + gather.packed, world_ * gather.packed, at::kByte);
  ZERO_RETURN_IF_ERROR(out.status());
  gather.staging_out = out.value();
  int64_t offset = 0;
  for (const GatherParam& param : gather.spec.params) {
    const int64_t nbytes =
        packed_bytes(param.chunk_numel, Gather::row_of(param));
    gather.in_slots.push_back(gather.staging_in.narrow(0, offset, nbytes));
    for (int k = 0; k < world_; ++k) {
      gather.arrived.push_back(gather.staging_out.narrow(
          0, k * gather.packed + offset, nbytes));
    }
    offset += nbytes;
  }
  return {};
}

// Every rank unpacks what every rank has packed, itself too: so all of them
// have the same weight, to the bit.
Status Engine::unpack(Gather& gather) {
  size_t next = 0;
  for (size_t i = 0; i < gather.slots.size(); ++i) {
    const GatherParam& param = gather.spec.params[i];
    const int64_t chunk = param.chunk_numel;
    for (int k = 0; k < world_; ++k) {
      ZERO_RETURN_IF_ERROR(unpack_rows(
          gather.arrived[next++], Gather::row_of(param), gather.spec.wire,
          gather.slots[i].narrow(0, k * chunk, chunk)));
    }
  }
  return {};
}

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
  if (gather.quantised()) {
    in = gather.staging_in;
    out = gather.staging_out;
    for (size_t i = 0; i < gather.inputs.size(); ++i) {
      ZERO_RETURN_IF_ERROR(pack_rows(
          gather.inputs[i].view({-1}), Gather::row_of(spec.params[i]), spec.wire,
          gather.in_slots[i]));
    }
  } else if (spec.params.size() == 1) {
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
  transport_->about(spec.label);
  StartResult started = transport_->start_all_gather(in, out);
  if (!started.ok()) {
    return poison("gather", spec.label, started.status().message());
  }
  gather.handle = std::move(started.value());
  counters_.bytes_gathered += static_cast<int64_t>(out.nbytes());
  return {};
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
    if (gather.quantised()) {
      return unpack(gather);
    }
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

}  // namespace zero
