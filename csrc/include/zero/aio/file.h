// File: an open file of a fixed size, with a direct and a plain descriptor.
//
// Ownership  A File owns its descriptors; the last FilePtr or Engine::close
//            closes them. The file on disk is never removed here, except one
//            that open() made and could not finish.
// Threads    The public methods may be called from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "zero/status.h"

namespace zero::aio {

// Direct transfers need offsets, addresses and sizes that are multiples of this:
// a page, and no less than any common disk's sector.
constexpr int64_t kAlign = 4096;

class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  ~UniqueFd() {
    reset();
  }
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  int get() const {
    return fd_;
  }
  void reset();

 private:
  int fd_ = -1;
};

struct OpenOptions {
  // Make the file, which must not exist, with its space allocated on disk. Else
  // it must exist and have at least `nbytes` bytes.
  bool create = false;
  bool direct = true;  // where the file system can
  std::string label = {};  // for messages, where a request has none
  // What messages call the file, where its path says nothing (/proc/self/fd/3).
  std::string name = {};
};

struct Failure;

class File {
 public:
  // Blocks for the allocation. What open() made and could not finish is removed.
  static Result<std::shared_ptr<File>> open(
      const std::string& path,
      int64_t nbytes,
      OpenOptions options);

  const std::string& path() const {
    return path_;
  }
  // For messages.
  const std::string& name() const {
    return options_.name.empty() ? path_ : options_.name;
  }
  int64_t nbytes() const {
    return nbytes_;
  }
  // False where O_DIRECT was not asked for or is refused; it may become false
  // at a transfer.
  bool direct() const {
    return direct_.load(std::memory_order_relaxed);
  }
  // False for an existing file that may only be read.
  bool writable() const {
    return writable_;
  }

 private:
  friend class Engine;

  File(std::string path, int64_t nbytes, OpenOptions options)
      : path_(std::move(path)), nbytes_(nbytes), options_(std::move(options)) {}
  Status open_descriptors();

  const std::string path_;
  const int64_t nbytes_;
  const OpenOptions options_;
  bool writable_ = true;
  UniqueFd plain_;
  UniqueFd direct_fd_;
  std::atomic<bool> direct_ = false;
  // Guarded by the engine's lock.
  int plain_number_ = -1;  // in the storage's table
  int direct_number_ = -1;
  int pending_[2] = {0, 0};  // reads, writes
  int syncing_ = 0;  // calls of Engine::sync
  bool closed_ = false;
  std::vector<std::shared_ptr<Failure>> failed_writes_;  // until sync tells
};

using FilePtr = std::shared_ptr<File>;

}  // namespace zero::aio
