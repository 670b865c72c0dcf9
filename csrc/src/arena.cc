#include "zero/arena.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/ScalarType.h>
#include <sys/mman.h>

#include <cstdlib>
#include <exception>
#include <new>
#include <string>

#include "zero/alloc_meter.h"

namespace zero {
namespace {

// Slots are planned on 4096-byte boundaries, which hold in memory only if the
// block begins on one (c10's CPU allocator promises 64).
constexpr size_t kPage = 4096;
// Blocks of several huge pages begin on one: the first touch of fresh memory
// costs more than the transfer that follows, and 512 times fewer faults help.
constexpr size_t kHugePage = size_t{2} << 20;

at::Tensor allocate_cpu(int64_t nbytes) {
  const auto size = static_cast<size_t>(nbytes);
  const size_t alignment = size >= 4 * kHugePage ? kHugePage : kPage;
  void* data = nullptr;
  if (::posix_memalign(&data, alignment, size) != 0) {
    throw std::bad_alloc();
  }
  if (alignment == kHugePage) {
    // Advice: where it is refused the block is merely slower to touch.
    (void)::madvise(data, size, MADV_HUGEPAGE);
  }
  const bool counted = meter::allocated(size);
  return at::from_blob(
      data,
      {nbytes},
      [size, counted](void* block) {
        if (counted) {
          meter::freed(size);
        }
        std::free(block);
      },
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
