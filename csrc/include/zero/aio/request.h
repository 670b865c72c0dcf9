// Request: one read or write under way.
//
// Threads    Every method may be called from any thread.
// Blocking   wait() only.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "zero/aio/file.h"
#include "zero/status.h"

namespace zero::aio {

// What the engine and its requests share; it lives as long as any of them.
struct Shared {
  std::mutex mutex;
  std::condition_variable changed;  // a request is done
};

// The outcome of a failed request; its file keeps it too, until somebody knows.
struct Failure {
  Status status;
  int64_t at = 0;  // the byte of the file that could not be moved
  bool known = false;  // guarded by the shared lock
};

class Request {
 public:
  Request(
      std::shared_ptr<Shared> shared,
      FilePtr file,
      bool write,
      char* data,
      int64_t size,
      int64_t offset,
      std::string label);

  const std::string& label() const {
    return label_;
  }
  const FilePtr& file() const {
    return file_;
  }
  bool write() const {
    return write_;
  }
  int64_t offset() const {
    return offset_;
  }
  int64_t size() const {
    return size_;
  }

  // The request's memory is free again. True after failures too.
  bool done() const {
    return done_.load(std::memory_order_acquire);
  }
  // True when done within the time; fails in a forked child.
  Result<bool> wait(int milliseconds);
  // Only when done(): null after success. The caller knows from then on, and
  // Engine::sync is silent about it.
  std::shared_ptr<const Failure> failure();

  // Nanoseconds of the monotonic clock: the first block was submitted, the last
  // one was done. Only when done().
  int64_t begin_ns() const {
    return begin_ns_;
  }
  int64_t end_ns() const {
    return end_ns_;
  }

 private:
  friend class Engine;

  const pid_t pid_;
  const std::shared_ptr<Shared> shared_;
  const FilePtr file_;
  const bool write_;
  char* const data_;
  const int64_t size_;
  const int64_t offset_;
  const std::string label_;
  std::atomic<bool> done_ = false;
  // Guarded by the shared lock; constant once done.
  int64_t cut_ = 0;  // bytes that have become blocks
  int in_flight_ = 0;  // blocks
  int64_t begin_ns_ = 0;
  int64_t end_ns_ = 0;
  std::shared_ptr<Failure> failure_;
  std::shared_ptr<void> held_;  // until it is done
};

using RequestPtr = std::shared_ptr<Request>;

}  // namespace zero::aio
