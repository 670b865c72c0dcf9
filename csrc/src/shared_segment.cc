#include "zero/shared_segment.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <exception>
#include <string>

namespace zero {
namespace {

// Growing by less would map the same space again and again.
constexpr int64_t kGrain = int64_t{1} << 20;

Status failed(const std::string& what, int error) {
  return Status::error(what + ": " + std::strerror(error));
}

}  // namespace

Result<std::shared_ptr<SharedSegment>> SharedSegment::open(
    int fd,
    int64_t space_bytes) {
  if (space_bytes <= 0 || space_bytes % kGrain != 0) {
    return Status::error("a space of a shared segment has a multiple of 1 MiB");
  }
  const int own = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (own < 0) {
    return failed("the shared segment could not be opened", errno);
  }
  return std::shared_ptr<SharedSegment>(new SharedSegment(own, space_bytes));
}

Result<std::shared_ptr<SharedSegment>> SharedSegment::create(
    int64_t space_bytes) {
  const int fd = ::memfd_create("zero-segment", MFD_CLOEXEC);
  if (fd < 0) {
    return failed("a shared segment could not be made", errno);
  }
  auto segment = open(fd, space_bytes);
  (void)::close(fd);
  return segment;
}

SharedSegment::~SharedSegment() {
  (void)::close(fd_);
}

Result<at::Tensor> SharedSegment::block(
    int space,
    int64_t nbytes,
    bool reserve) {
  if (nbytes < 0 || nbytes > space_bytes_) {
    return Status::error(
        "a block of " + std::to_string(nbytes) + " bytes does not fit a space");
  }
  const int64_t begin = space * space_bytes_;
  if (reserve && nbytes > 0) {
    // Pages that are there already are kept. Without this, a machine that is
    // short of memory would end the process at the first touch.
    int error = 0;
    do {  // a signal (of a child that ended, of a timer) may come between
      error = ::posix_fallocate(fd_, begin, nbytes);
    } while (error == EINTR);
    if (error != 0) {
      return failed(
          std::to_string(nbytes) + " bytes of shared memory could not be had",
          error);
    }
  }
  const std::lock_guard lock(mutex_);
  at::Tensor& known = largest_[space];
  try {
    if (!known.defined() || known.numel() < nbytes) {
      const int64_t mapped = (nbytes + kGrain - 1) / kGrain * kGrain;
      const auto length = static_cast<size_t>(mapped);
      void* data = nullptr;
      if (length > 0) {
        data = ::mmap(
            nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, begin);
        if (data == MAP_FAILED) {
          return failed("shared memory could not be mapped", errno);
        }
        // Advice: where it is refused the block is merely slower to touch.
        (void)::madvise(data, length, MADV_HUGEPAGE);
      }
      known = at::from_blob(
          data,
          {mapped},
          [length](void* block) {
            if (length > 0) {
              (void)::munmap(block, length);
            }
          },
          at::TensorOptions(at::kByte));
    }
    void* data = known.mutable_data_ptr();
    return at::from_blob(
        data,
        {nbytes},
        [whole = known](void*) {},
        at::TensorOptions(at::kByte));
  } catch (const std::exception& error) {
    return Status::error(error.what());
  }
}

}  // namespace zero
