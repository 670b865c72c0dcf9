// Arena: one block of device memory in which the compiler has planned offsets.
//
// Engines whose transfers are planned together share one.
//
// Ownership  The block lives as long as the Arena or any slice() of it.
// Blocking   The first slice() allocates; nothing else does.
// Threads    Every method may be called from any thread.
#pragma once

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <functional>
#include <mutex>
#include <utility>

#include "zero/status.h"

namespace zero {

class Arena {
 public:
  // Where the block comes from: uint8[nbytes] on the device.
  using Source = std::function<Result<at::Tensor>(int64_t nbytes)>;

  // Without a source: from c10's allocator, or the host's.
  Arena(int64_t nbytes, c10::Device device, Source source = {})
      : nbytes_(nbytes), device_(device), source_(std::move(source)) {}

  int64_t nbytes() const {
    return nbytes_;
  }
  c10::Device device() const {
    return device_;
  }
  const Source& source() const {
    return source_;
  }
  bool allocated() const {
    const std::lock_guard lock(mutex_);
    return block_.defined();
  }

  // Fails unless [offset, offset + numel elements) lies in the arena, aligned
  // for the dtype. Allocates nothing.
  Status check(int64_t offset, int64_t numel, c10::ScalarType dtype) const;

  // A flat tensor over that range, with a storage of its own: two slots of an
  // arena are not aliases of one another unless the plan made them overlap.
  Result<at::Tensor> slice(
      int64_t offset,
      int64_t numel,
      c10::ScalarType dtype);

 private:
  Status allocate();

  const int64_t nbytes_;
  const c10::Device device_;
  const Source source_;
  mutable std::mutex mutex_;  // guards what follows
  at::Tensor block_;  // uint8[nbytes_], undefined until first used
};

}  // namespace zero
