#include "zero/arena.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/ScalarType.h>

#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "zero/host_block.h"

namespace zero {
namespace {

// On a page, as slots are planned on 4096-byte boundaries (c10's CPU allocator
// promises 64).
at::Tensor allocate_cpu(int64_t nbytes) {
  auto block = std::make_shared<c10::DataPtr>(
      host_block(static_cast<size_t>(nbytes)));
  void* data = block->get();
  return at::from_blob(
      data,
      {nbytes},
      [block = std::move(block)](void*) {},
      at::TensorOptions(at::kByte));
}

}  // namespace

Status Arena::check(int64_t offset, int64_t numel, c10::ScalarType dtype)
    const {
  const auto itemsize = static_cast<int64_t>(c10::elementSize(dtype));
  if (offset < 0 || numel < 0 || offset > nbytes_ ||
      numel > (nbytes_ - offset) / itemsize) {
    return Status::error(
        "a slot of " + std::to_string(numel) + " elements of " +
        std::to_string(itemsize) + " bytes at offset " +
        std::to_string(offset) + " does not fit an arena of " +
        std::to_string(nbytes_) + " bytes");
  }
  if (offset % itemsize != 0) {
    return Status::error(
        "offset " + std::to_string(offset) +
        " is not aligned to elements of " + std::to_string(itemsize) +
        " bytes");
  }
  return {};
}

Status Arena::allocate() {
  if (source_) {
    auto block = source_(nbytes_);
    ZERO_RETURN_IF_ERROR(block.status());
    block_ = block.value();
    return {};
  }
  try {
    block_ = device_.is_cpu() && nbytes_ > 0
        ? allocate_cpu(nbytes_)
        : at::empty({nbytes_}, at::TensorOptions(at::kByte).device(device_));
  } catch (const std::exception& error) {
    return Status::error(
        "an arena of " + std::to_string(nbytes_) + " bytes on " +
        device_.str() + " could not be allocated: " + error.what());
  }
  return {};
}

Result<at::Tensor> Arena::slice(
    int64_t offset,
    int64_t numel,
    c10::ScalarType dtype) {
  ZERO_RETURN_IF_ERROR(check(offset, numel, dtype));
  const std::lock_guard lock(mutex_);
  if (!block_.defined()) {
    ZERO_RETURN_IF_ERROR(allocate());
  }
  // Device memory has addresses too: this is arithmetic, not access.
  void* data = static_cast<char*>(block_.mutable_data_ptr()) + offset;
  return at::from_blob(
      data,
      {numel},
      [block = block_](void*) {},  // the slot keeps the block alive
      at::TensorOptions(dtype).device(block_.device()),
      block_.device());
}

}  // namespace zero
