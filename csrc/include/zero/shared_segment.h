// SharedSegment: one memory file that the ranks of one host map.
//
// The file is sparse. Space i begins at byte i * space_bytes, so that each space
// grows without moving another one; pages exist where a rank asked for them.
// It has no name: it is gone with the last process that holds it open or
// mapped, however that process ends.
//
// Ownership  The segment holds the file open. A block keeps its mapping alive,
//            also after the segment is gone.
// Blocking   block() asks the kernel for memory, which takes time for new pages.
// Threads    Every method may be called from any thread.
#pragma once

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "zero/status.h"

namespace zero {

class SharedSegment {
 public:
  // `fd` stays the caller's.
  static Result<std::shared_ptr<SharedSegment>> open(
      int fd,
      int64_t space_bytes);
  // A new one, for ranks that are threads of one process or its children.
  static Result<std::shared_ptr<SharedSegment>> create(int64_t space_bytes);

  ~SharedSegment();
  SharedSegment(const SharedSegment&) = delete;
  SharedSegment& operator=(const SharedSegment&) = delete;

  int fd() const {
    return fd_;
  }

  // uint8[nbytes], the beginning of a space. With `reserve` its pages exist
  // afterwards, or this fails; without, reading what nobody reserved is fatal.
  Result<at::Tensor> block(int space, int64_t nbytes, bool reserve);

 private:
  SharedSegment(int fd, int64_t space_bytes)
      : fd_(fd), space_bytes_(space_bytes) {}

  const int fd_;
  const int64_t space_bytes_;
  std::mutex mutex_;
  std::map<int, at::Tensor> largest_;  // of each space, the largest block so far
};

}  // namespace zero
