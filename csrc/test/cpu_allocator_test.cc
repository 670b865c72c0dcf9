// The allocator of CPU memory: what c10 and its callers rely on.
#include "zero/cpu_allocator.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/_lazy_clone.h>
#include <ATen/ops/ones.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "zero/alloc_meter.h"

namespace {

using at::Tensor;

// Sanitizers replace malloc(), so it is never installed here; it is set by hand.
struct InUse {
  InUse() {
    c10::SetCPUAllocator(zero::cpu_allocator());
  }
  ~InUse() {
    c10::SetCPUAllocator(c10::GetDefaultCPUAllocator());
  }
};

Tensor bytes(int64_t count) {
  return at::empty({count}, at::TensorOptions(at::kByte));
}

bool is_aligned(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % 64 == 0;
}

std::string error_of(c10::Allocator* allocator, size_t nbytes) {
  try {
    allocator->allocate(nbytes);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

TEST(a_block_is_aligned_and_has_all_its_bytes) {
  c10::Allocator* allocator = zero::cpu_allocator();
  std::vector<c10::DataPtr> held;
  for (size_t nbytes = 1; nbytes < (size_t{8} << 20);
       nbytes += nbytes < 300 ? 1 : nbytes / 3) {
    c10::DataPtr block = allocator->allocate(nbytes);
    CHECK_TRUE(is_aligned(block.get()));
    CHECK_TRUE(block.device().is_cpu());
    auto* data = static_cast<char*>(block.get());
    data[0] = 1;
    data[nbytes - 1] = 1;  // the address sanitizer knows where it ends
    if (nbytes % 2 == 0) {
      held.push_back(std::move(block));
    }
  }
}

TEST(no_bytes_are_no_block) {
  const c10::DataPtr none = zero::cpu_allocator()->allocate(0);
  CHECK_TRUE(none.get() == nullptr);
  CHECK_TRUE(none.get_context() == nullptr);
  zero::cpu_allocator()->raw_deallocate(nullptr);
  const InUse in_use;
  CHECK_EQ(bytes(0).numel(), 0);
}

TEST(what_cannot_be_had_fails_as_with_c10) {
  constexpr size_t kMost = std::numeric_limits<size_t>::max();
  // Some would pass the end of size_t together with the alignment, some were
  // negative.
  for (const size_t nbytes :
       {size_t{1} << 60,
        kMost / 2,
        kMost / 2 + 1,
        kMost - 65,
        kMost - 64,
        kMost - 63,
        kMost - 1,
        kMost}) {
    const std::string said = error_of(zero::cpu_allocator(), nbytes);
    CHECK_EQ(said, error_of(c10::GetDefaultCPUAllocator(), nbytes));
    CHECK_TRUE(check::contains(said, "alloc"));
  }
}

TEST(blocks_are_freed_by_any_thread) {
  const InUse in_use;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    std::vector<Tensor> handed_over;
    for (int i = 1; i < 200; ++i) {
      handed_over.push_back(bytes(37 * i));
      static_cast<char*>(handed_over.back().data_ptr())[0] = 1;
    }
    threads.emplace_back([handed_over = std::move(handed_over)]() mutable {
      while (!handed_over.empty()) {
        static_cast<char*>(handed_over.back().data_ptr())[0] += 1;
        handed_over.pop_back();
        static_cast<char*>(bytes(100).data_ptr())[99] = 1;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

TEST(blocks_are_freed_as_they_were_allocated) {
  Tensor early = at::ones({1000});
  Tensor inside;
  {
    const InUse in_use;
    early.reset();
    early = at::ones({10});
    inside = at::ones({1000});
    // It grows by the allocator that its storage has, which is another's.
    early.resize_({2000});
    CHECK_EQ(early[9].item<float>(), 1.0F);
  }
  inside.resize_({3000});
  CHECK_EQ(inside[999].item<float>(), 1.0F);
  CHECK_TRUE(is_aligned(inside.data_ptr()));
}

TEST(c10_works_on_its_blocks_without_knowing_it) {
  c10::Allocator* allocator = zero::cpu_allocator();
  void* raw = allocator->raw_allocate(100);
  CHECK_TRUE(is_aligned(raw));
  static_cast<char*>(raw)[99] = 7;
  const c10::DataPtr copy = allocator->clone(raw, 100);
  CHECK_EQ(static_cast<const char*>(copy.get())[99], 7);
  CHECK_TRUE(allocator->is_simple_data_ptr(copy));
  allocator->raw_deallocate(raw);

  const InUse in_use;
  const Tensor first = at::arange(100);
  const Tensor lazy = at::_lazy_clone(first);  // copied when either is written
  lazy.add_(1);
  CHECK_EQ(first[99].item<int64_t>(), 99);
  CHECK_EQ(lazy[99].item<int64_t>(), 100);
}

TEST(the_meter_goes_around_it) {
  const InUse in_use;
  CHECK_TRUE(zero::cpu_allocator_is_installed());
  zero::meter::install();
  CHECK_TRUE(zero::cpu_allocator_is_installed());
  const int64_t before = zero::meter::current();
  {
    const Tensor tensor = bytes(1000);
    CHECK_EQ(zero::meter::current() - before, 1000);
    CHECK_TRUE(is_aligned(tensor.data_ptr()));
  }
  CHECK_EQ(zero::meter::current(), before);
  zero::meter::uninstall();
  CHECK_TRUE(c10::GetCPUAllocator() == zero::cpu_allocator());
}

TEST(it_is_not_installed_where_malloc_is_not_of_glibc) {
  CHECK_TRUE(!zero::install_cpu_allocator());
  CHECK_TRUE(c10::GetCPUAllocator() == c10::GetDefaultCPUAllocator());
  CHECK_TRUE(!zero::cpu_allocator_is_installed());
}

}  // namespace
