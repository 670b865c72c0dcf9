#include "zero/aio/request.h"

#include <unistd.h>

#include <chrono>
#include <utility>

namespace zero::aio {

Request::Request(
    std::shared_ptr<Shared> shared,
    FilePtr file,
    bool write,
    char* data,
    int64_t size,
    int64_t offset,
    std::string label)
    : pid_(::getpid()),
      shared_(std::move(shared)),
      file_(std::move(file)),
      write_(write),
      data_(data),
      size_(size),
      offset_(offset),
      label_(std::move(label)) {}

Result<bool> Request::wait(int milliseconds) {
  if (done()) {
    return true;
  }
  if (::getpid() != pid_) {
    return Status::error(
        "this request belongs to process " + std::to_string(pid_) +
        ", and this is a forked child: make an Engine of its own here");
  }
  std::unique_lock lock(shared_->mutex);
  return shared_->changed.wait_for(
      lock, std::chrono::milliseconds(milliseconds), [this] { return done(); });
}

std::shared_ptr<const Failure> Request::failure() {
  if (failure_ != nullptr) {
    const std::lock_guard lock(shared_->mutex);
    failure_->known = true;
  }
  return failure_;
}

}  // namespace zero::aio
