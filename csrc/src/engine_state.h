// What the files of the Engine share, and nobody else includes: the state of one
// gather and of one reduction, and how torch is called.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/div.h>
#include <ATen/ops/full.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "zero/engine.h"
#include "zero/quantise.h"

namespace zero {

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

inline std::string describe(const char* operation, const std::string& label) {
  return label.empty() ? operation : std::string(operation) + " '" + label + "'";
}

inline Status misuse(
    const char* operation,
    const std::string& label,
    const std::string& problem) {
  return Status::error(describe(operation, label) + ": " + problem);
}

inline int64_t product(const std::vector<int64_t>& sizes, size_t begin = 0) {
  int64_t result = 1;
  for (size_t i = begin; i < sizes.size(); ++i) {
    result *= sizes[i];
  }
  return result;
}

inline int64_t bytes_of(int64_t numel, c10::ScalarType dtype) {
  return numel * static_cast<int64_t>(c10::elementSize(dtype));
}

inline char* address(const Tensor& tensor) {
  return static_cast<char*>(tensor.mutable_data_ptr());
}

inline const char* const_address(const Tensor& tensor) {
  return static_cast<const char*>(tensor.const_data_ptr());
}

// Same elements in the same order: a cast or a plain copy. memcpy skips a
// microsecond of dispatch, which is what small parameters cost.
inline void copy_flat(const Tensor& to, const Tensor& from) {
  if (to.is_cpu() && from.is_cpu() &&
      to.scalar_type() == from.scalar_type()) {
    if (to.numel() > 0) {
      std::memcpy(address(to), const_address(from), to.nbytes());
    }
    return;
  }
  to.copy_(from, /*non_blocking=*/true);
}

inline Status check_input(
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
inline c10::Device device_of(const std::vector<Tensor>& tensors, c10::Device fallback) {
  return tensors.empty() || !tensors.front().defined()
      ? fallback
      : tensors.front().device();
}

struct Engine::Gather {
  enum class State { kIdle, kStarted, kWaiting, kReady };

  explicit Gather(GatherSpec given) : spec(std::move(given)) {
    for (const GatherParam& param : spec.params) {
      total += param.chunk_numel;
      packed += packed_bytes(param.chunk_numel, row_of(param));
    }
  }

  // Elements of a row of a parameter.
  static int64_t row_of(const GatherParam& param) {
    return std::max<int64_t>(1, product(param.sizes, 1));
  }
  bool quantised() const {
    return spec.wire != c10::ScalarType::Undefined;
  }

  GatherSpec spec;
  int64_t total = 0;  // S
  int64_t packed = 0;  // S of chunks that travel packed, in bytes
  int direct = -1;  // operation of Direct, where the slots are shared
  State state = State::kIdle;

  // Tensors over the arena, made once by build().
  bool built = false;
  Tensor staging_in;  // [S]
  Tensor staging_out;  // [W * S]
  std::vector<Tensor> in_slots;  // of staging_in, one a parameter
  std::vector<Tensor> arrived;  // packed: of staging_out, rank after rank
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
    for (auto* tensors :
         {&in_slots, &arrived, &from_rows, &to_rows, &slots, &full}) {
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

  // This rank's chunks, one after the other, each as one row: blocks are of what
  // one rank is due, whatever the rows.
  std::vector<Rows> rows() const {
    std::vector<Rows> out;
    for (const ReduceParam& param : spec.params) {
      out.push_back({param.chunk_numel, param.chunk_numel});
    }
    return out;
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

}  // namespace zero
