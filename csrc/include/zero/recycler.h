// Recycler: storages for tensors that leave the engine (they become p.grad).
//
// A storage handed out before is handed out again once nobody outside holds it,
// so a training loop that drops its gradients each step allocates only in its
// first one.
//
// Ownership  The pool and the receiver share each storage. The pool remembers
//            at most `limit` storages a size (see expect()); it forgets the one
//            handed out longest ago, which its holder then frees. trim() gives
//            back what nobody outside holds.
// Streams    A storage is reused at once, so on an accelerator its last reader
//            must be queued on the stream that will write it, or be waited for.
// Threads    acquire() and expect() must not overlap (the Engine's lock guards
//            them); tensors handed out may be dropped on any thread.
#pragma once

#include <ATen/core/TensorBody.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace zero {

// Whether the caller's reference is the only one, and if so, with all accesses
// of former holders visible. Memory may then be written.
bool held_by_nobody_else(const c10::Storage& storage);

class Recycler {
 public:
  // `limit`: see trim().
  explicit Recycler(int64_t limit = -1) : limit_(limit) {}

  // Announces one more tensor of this size a step.
  void expect(int64_t nbytes, c10::Device device);

  // A contiguous tensor with undefined contents. May throw c10::Error when the
  // allocator does.
  at::Tensor acquire(
      at::IntArrayRef sizes,
      c10::ScalarType dtype,
      c10::Device device);

  // Forgets storages that nobody else holds until at most `nbytes` of such are
  // left. Gives them to the caller, who frees them. From here on acquire() does
  // the same before it takes more memory. Negative: all may stay.
  std::vector<c10::Storage> trim(int64_t nbytes);

  void clear();

  int64_t allocations() const {
    return allocations_;
  }
  int64_t recycled() const {
    return recycled_;
  }

 private:
  struct Class {
    std::vector<c10::Storage> storages;
    size_t next = 0;  // where the search for a free one begins
    size_t expected = 0;
  };

  // Keyed by (bytes, device as "type, index").
  std::map<std::pair<int64_t, std::pair<int, int>>, Class> classes_;
  int64_t limit_;
  int64_t allocations_ = 0;
  int64_t recycled_ = 0;
};

}  // namespace zero
