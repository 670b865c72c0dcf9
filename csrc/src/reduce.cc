// Reductions: this rank's chunks of the mean gradients out of every rank's full ones.
#include <algorithm>
#include <cstring>

#include "engine_state.h"
#include "zero/sum.h"

namespace zero {

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
  Recycler& results = pool(spec.passes);
  const bool lone = spec.params.size() == 1;
  const Tensor& first = reduce.inputs[0];
  reduce.copied = false;

  // A lone result of the right dtype needs no place in between: the transport
  // writes what the caller gets.
  Tensor out = reduce.staging_out;
  if (lone && spec.dtype == spec.out_dtype) {
    const ReduceParam& param = spec.params[0];
    out = spec.replicated
        ? results.acquire(param.sizes, spec.out_dtype, first.device()).view({-1})
        : results.acquire({param.chunk_numel}, spec.out_dtype, first.device());
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
    transport_->about(spec.label);
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

  transport_->about(spec.label);
  StartResult started = spec.wire == c10::ScalarType::Undefined
      ? transport_->start_reduce_scatter(in, out)
      : transport_->start_packed_reduce_scatter(
            in, out, spec.wire, reduce.rows());
  if (!started.ok()) {
    return poison("reduce", spec.label, started.status().message());
  }
  reduce.handle = std::move(started.value());
  counters_.bytes_reduced += static_cast<int64_t>(in.nbytes());
  return {};
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
    Tensor out = pool(spec.passes)
                     .acquire({param.chunk_numel}, spec.out_dtype, sum.device());
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
    Tensor out = pool(spec.passes)
                     .acquire({param.chunk_numel}, spec.out_dtype, c10::kCPU);
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
    Tensor out = pool(spec.passes).acquire(sizes, spec.out_dtype, grad.device());
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
      Tensor wide = passing_.acquire(param.sizes, spec.dtype, grad.device());
      wide.copy_(grad, /*non_blocking=*/true);
      reduce.divide(wide, wide);
      full.copy_(wide, /*non_blocking=*/true);
    }
    reduce.results.push_back(out);
  }
}

}  // namespace zero
