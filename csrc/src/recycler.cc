#include "zero/recycler.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>

namespace zero {
namespace {

std::pair<int64_t, std::pair<int, int>> key_of(
    int64_t nbytes,
    c10::Device device) {
  return {
      nbytes, {static_cast<int>(device.type()), static_cast<int>(device.index())}};
}

// A new tensor over the storage. The pool keeps storages and not tensors: a
// tensor that Python has seen keeps its Python object, hence a second owner,
// for as long as C++ holds it, and so would never look free again.
at::Tensor tensor_over(
    c10::Storage storage,
    at::IntArrayRef sizes,
    c10::ScalarType dtype,
    c10::Device device) {
  const auto options = at::TensorOptions(dtype).device(device);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage),
      c10::DispatchKeySet(options.computeDispatchKey()),
      options.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

}  // namespace

bool held_by_nobody_else(const c10::Storage& storage) {
  if (storage.use_count() != 1) {
    return false;
  }
  // That was a relaxed load. Taking and dropping one more reference is an
  // acquiring operation on the same counter: it orders the last holder's
  // accesses, which came before it let go, before ours. (A fence would too, but
  // ThreadSanitizer does not know fences.)
  const c10::Storage acquire = storage;
  return true;
}

void Recycler::expect(int64_t nbytes, c10::Device device) {
  classes_[key_of(nbytes, device)].expected += 1;
}

at::Tensor Recycler::acquire(
    at::IntArrayRef sizes,
    c10::ScalarType dtype,
    c10::Device device) {
  int64_t nbytes = static_cast<int64_t>(c10::elementSize(dtype));
  for (const int64_t size : sizes) {
    nbytes *= size;
  }
  if (nbytes == 0) {
    return at::empty(sizes, at::TensorOptions(dtype).device(device));
  }

  Class& pool = classes_[key_of(nbytes, device)];
  const size_t count = pool.storages.size();
  for (size_t step = 0; step < count; ++step) {
    const size_t index = (pool.next + step) % count;
    c10::Storage& storage = pool.storages[index];
    // A receiver may have resized or taken the memory; such a storage is held
    // by nobody but useless.
    if (held_by_nobody_else(storage) && storage.data() != nullptr &&
        storage.nbytes() == static_cast<size_t>(nbytes)) {
      pool.next = (index + 1) % count;
      recycled_ += 1;
      return tensor_over(storage, sizes, dtype, device);
    }
  }

  if (limit_ >= 0) {
    trim(limit_);
  }
  const size_t left = pool.storages.size();
  at::Tensor fresh = at::empty(sizes, at::TensorOptions(dtype).device(device));
  allocations_ += 1;
  // Twice the tensors of a step: one set in p.grad, one arriving beside it.
  if (left < 2 * pool.expected) {
    pool.storages.push_back(fresh.storage());
    pool.next = 0;
  } else if (left > 0) {
    pool.storages[pool.next] = fresh.storage();
    pool.next = (pool.next + 1) % left;
  }
  return fresh;
}

std::vector<c10::Storage> Recycler::trim(int64_t nbytes) {
  std::vector<c10::Storage> dropped;
  limit_ = nbytes;
  if (nbytes < 0) {
    return dropped;
  }
  int64_t known = 0;  // in the pool, held by others or not
  for (const auto& [key, pool] : classes_) {
    known += key.first * static_cast<int64_t>(pool.storages.size());
  }
  if (known <= nbytes) {
    return dropped;
  }
  int64_t idle = 0;
  // The largest go first: few calls of the allocator give back the most.
  for (auto it = classes_.rbegin(); it != classes_.rend(); ++it) {
    for (const c10::Storage& storage : it->second.storages) {
      idle += held_by_nobody_else(storage) ? it->first.first : 0;
    }
  }
  for (auto it = classes_.rbegin(); it != classes_.rend() && idle > nbytes; ++it) {
    auto& storages = it->second.storages;
    for (size_t i = 0; i < storages.size() && idle > nbytes;) {
      if (!held_by_nobody_else(storages[i])) {
        ++i;
        continue;
      }
      idle -= it->first.first;
      dropped.push_back(std::move(storages[i]));
      storages[i] = std::move(storages.back());
      storages.pop_back();
    }
    it->second.next = 0;
  }
  return dropped;
}

void Recycler::clear() {
  classes_.clear();
}

}  // namespace zero
