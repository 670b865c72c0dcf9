#include "zero/host_block.h"

#include <sys/mman.h>

#include <cstdint>
#include <memory>
#include <new>

#include "zero/alloc_meter.h"

namespace zero {
namespace {

constexpr size_t kPage = 4096;
// Blocks that hold a huge page begin on one: the first touch of fresh memory
// costs more than the transfer that follows, and 512 times fewer faults help.
constexpr size_t kHugePage = size_t{2} << 20;

struct Block {
  void* data = nullptr;
  size_t mapped = 0;
  size_t counted = 0;

  Block() = default;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() {
    if (counted > 0) {
      meter::freed(counted);
    }
    if (data != nullptr) {
      (void)::munmap(data, mapped);
    }
  }
};

void unmap(void* block) {
  delete static_cast<Block*>(block);
}

size_t rounded(size_t nbytes, size_t to) {
  return (nbytes + to - 1) / to * to;
}

}  // namespace

c10::DataPtr host_block(size_t nbytes) {
  auto block = std::make_unique<Block>();
  const bool huge = nbytes >= kHugePage;
  const size_t spare = huge ? kHugePage : 0;
  block->mapped = rounded(nbytes, kPage);
  void* found = ::mmap(
      nullptr,
      block->mapped + spare,
      PROT_READ | PROT_WRITE,
      MAP_PRIVATE | MAP_ANONYMOUS,
      -1,
      0);
  if (found == MAP_FAILED) {
    throw std::bad_alloc();
  }
  auto* begin = static_cast<char*>(found);
  if (spare > 0) {
    // Give back what lies before the first huge page, and what is left behind.
    const size_t before =
        rounded(reinterpret_cast<uintptr_t>(begin), kHugePage) -
        reinterpret_cast<uintptr_t>(begin);
    if (before > 0) {
      (void)::munmap(begin, before);
    }
    begin += before;
    if (before < spare) {
      (void)::munmap(begin + block->mapped, spare - before);
    }
  }
  block->data = begin;
  // Advice: where it is refused the block is merely slower to touch.
  (void)::madvise(begin, block->mapped, MADV_HUGEPAGE);
  if (meter::allocated(nbytes)) {
    block->counted = nbytes;
  }
  return {begin, block.release(), &unmap, c10::Device(c10::DeviceType::CPU)};
}

}  // namespace zero
