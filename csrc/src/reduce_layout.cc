// Where the bytes of a reduction lie: checked once when it is added, and made into
// tensors over the arena when it first runs.
#include <algorithm>
#include <cmath>

#include "engine_state.h"

namespace zero {

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
  if (spec.wire != c10::ScalarType::Undefined) {
    if (!can_quantise_to(spec.wire) || !can_quantise_from(spec.dtype)) {
      return bad(
          std::string("gradients of ") + c10::toString(spec.dtype) +
          " cannot travel in " + c10::toString(spec.wire));
    }
    if (world_ == 1 || shared || spec.replicated) {
      return bad("nothing is scattered between hosts that could travel packed");
    }
  }
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
    pool(spec.passes).expect(
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
      auto slot = slice(arena, offset, product(param.sizes), spec.dtype);
      ZERO_RETURN_IF_ERROR(slot.status());
      reduce.out_slots.push_back(slot.value().view(param.sizes));
      offset += bytes_of(product(param.sizes), spec.dtype);
    }
    reduce.built = true;
    return {};
  }

  const int64_t total = reduce.total;
  const int64_t in_numel = spec.replicated ? total : world_ * total;
  auto in = slice(arena, spec.staging_offset, in_numel, spec.dtype);
  ZERO_RETURN_IF_ERROR(in.status());
  reduce.staging_in = in.value();
  if (spec.replicated) {
    reduce.staging_out = reduce.staging_in;
  } else {
    auto out = slice(
        arena,
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

  reduce.built = true;
  return {};
}

}  // namespace zero
