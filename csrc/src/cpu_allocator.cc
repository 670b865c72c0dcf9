#include "zero/cpu_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/alignment.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>
#include <c10/util/Flags.h>
#include <c10/util/env.h>
#include <c10/util/numa.h>
#include <malloc.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <new>

#include "zero/alloc_meter.h"

C10_DECLARE_bool(caffe2_cpu_allocator_do_zero_fill);
C10_DECLARE_bool(caffe2_cpu_allocator_do_junk_fill);

namespace zero {
namespace {

constexpr size_t kAlignment = 64;
static_assert(kAlignment >= c10::gAlignment);

// Stands in front of each block. malloc() aligns to alignof(max_align_t), so
// there is always room for it between what malloc() gave and the next multiple
// of 64.
struct BlockHeader {
  void* given;  // by malloc()
};
static_assert(sizeof(BlockHeader) <= alignof(std::max_align_t));

// What malloc() gives for a block of so many bytes and its alignment.
//
// Throws c10's own error where there is no memory, or where the size was
// negative before it became unsigned.
void* take(size_t nbytes) {
  for (;;) {
    if (nbytes <= std::numeric_limits<size_t>::max() - kAlignment) {
      if (void* given = std::malloc(nbytes + kAlignment)) {
        return given;
      }
    }
    // This throws, unless memory was freed meanwhile. Then malloc() has it too.
    c10::free_cpu(c10::alloc_cpu(nbytes));
  }
}

void delete_block(void* data) {
  if (data == nullptr) {
    return;
  }
  c10::profiledCPUMemoryReporter().Delete(data);
  std::free((static_cast<BlockHeader*>(data) - 1)->given);
}

class CpuAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (nbytes == 0) {
      return {nullptr, nullptr, &delete_block, cpu};
    }
    void* given = nullptr;
    try {
      given = take(nbytes);
    } catch (const c10::Error&) {
      c10::profiledCPUMemoryReporter().OutOfMemory(nbytes);
      throw;
    }
    const auto begin = reinterpret_cast<uintptr_t>(given);
    auto* data = static_cast<char*>(given) + (kAlignment - begin % kAlignment);
    new (data - sizeof(BlockHeader)) BlockHeader{given};
    c10::profiledCPUMemoryReporter().New(data, nbytes);
    return {data, data, &delete_block, cpu};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &delete_block;
  }

  void copy_data(void* dest, const void* src, size_t count) const override {
    default_copy_data(dest, src, count);
  }
};

// Whether c10's own allocator does more than to allocate.
bool c10_is_told_more() {
  return FLAGS_caffe2_cpu_allocator_do_zero_fill ||
      FLAGS_caffe2_cpu_allocator_do_junk_fill || c10::IsNUMAEnabled() ||
      c10::utils::check_env("THP_MEM_ALLOC_ENABLE") == true;
}

#ifdef __GLIBC__
#if __GLIBC_PREREQ(2, 33)
using HeapBytes = size_t;
HeapBytes heap_in_use() {
  const struct mallinfo2 info = mallinfo2();
  return info.uordblks + info.hblkhd;
}
#else
using HeapBytes = unsigned;  // that is as far as it counts
HeapBytes heap_in_use() {
  const struct mallinfo info = mallinfo();
  return static_cast<HeapBytes>(info.uordblks) +
      static_cast<HeapBytes>(info.hblkhd);
}
#endif

// Whether a block of c10's own allocator shows in glibc's account of its heap.
// It does not where malloc() was replaced (jemalloc, say, or a sanitizer) or
// where torch was built with mimalloc. Other threads may allocate and free
// meanwhile, hence several tries.
bool c10_takes_from_glibc() {
  constexpr HeapBytes kProbe = 64 << 10;  // less than moves glibc's thresholds
  for (int attempt = 0; attempt < 4; ++attempt) {
    const HeapBytes before = heap_in_use();
    void* block = c10::alloc_cpu(kProbe);
    const HeapBytes with_block = heap_in_use();
    c10::free_cpu(block);
    const HeapBytes after = heap_in_use();
    constexpr HeapBytes kMost = 2 * kProbe;
    const HeapBytes taken = with_block - before;
    const HeapBytes freed = with_block - after;
    if (taken >= kProbe && taken < kMost && freed >= kProbe && freed < kMost) {
      return true;
    }
  }
  return false;
}
#else
bool c10_takes_from_glibc() {
  return false;
}
#endif

}  // namespace

c10::Allocator* cpu_allocator() {
  // Never destroyed: blocks are freed during static destruction too.
  static auto* const instance = new CpuAllocator;
  return instance;
}

bool cpu_allocator_is_installed() {
  return c10::GetCPUAllocator() == cpu_allocator() ||
      meter::is_around(cpu_allocator());
}

bool install_cpu_allocator() {
  const bool metered = meter::is_around(c10::GetDefaultCPUAllocator());
  const bool is_own = c10::GetCPUAllocator() == c10::GetDefaultCPUAllocator();
  if (!metered && !is_own) {
    return cpu_allocator_is_installed();
  }
  if (c10_is_told_more() || !c10_takes_from_glibc()) {
    return false;
  }
  if (metered) {
    meter::uninstall();
  }
  c10::SetCPUAllocator(cpu_allocator());
  if (metered) {
    meter::install();
  }
  return cpu_allocator_is_installed();
}

}  // namespace zero
