#include "zero/alloc_meter.h"

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <atomic>
#include <new>
#include <vector>

namespace zero::meter {
namespace {

struct State {
  std::atomic<int64_t> current{0};
  std::atomic<int64_t> peak{0};
  std::atomic<bool> counting{false};
};

// Blocks outlive the meter and are freed during static destruction too, so the
// state must never be destroyed: it is not.
State& state() {
  static State* const instance = new State;
  return *instance;
}

void add(size_t nbytes) {
  State& s = state();
  const int64_t now =
      s.current.fetch_add(static_cast<int64_t>(nbytes), std::memory_order_relaxed) +
      static_cast<int64_t>(nbytes);
  int64_t seen = s.peak.load(std::memory_order_relaxed);
  while (now > seen &&
         !s.peak.compare_exchange_weak(seen, now, std::memory_order_relaxed)) {
  }
}

void subtract(size_t nbytes) {
  state().current.fetch_sub(
      static_cast<int64_t>(nbytes), std::memory_order_relaxed);
}

// In front of each block. 64 bytes keep the alignment that c10 promises.
struct alignas(64) BlockHeader {
  size_t nbytes;  // as counted
  c10::DeleterFnPtr inner_deleter;
};
static_assert(sizeof(BlockHeader) == 64);

void delete_block(void* data) {
  if (data == nullptr) {
    return;
  }
  auto* header = static_cast<BlockHeader*>(data) - 1;
  subtract(header->nbytes);
  header->inner_deleter(header);
}

// The size stands in front of the block and the data pointer is its own
// context, as with c10's own allocator: callers of raw_allocate() and tests for
// a "simple" data pointer go on working, and no table needs a lock.
class MeteredAllocator final : public c10::Allocator {
 public:
  explicit MeteredAllocator(c10::Allocator* inner) : inner_(inner) {}

  c10::Allocator* inner() const {
    return inner_;
  }

  c10::DataPtr allocate(size_t nbytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (nbytes == 0) {
      return {nullptr, nullptr, &delete_block, cpu};
    }
    void* raw = inner_->raw_allocate(nbytes + sizeof(BlockHeader));
    // Uninstalled, but still here because another allocator wraps this one.
    const bool counting = state().counting.load(std::memory_order_relaxed);
    const size_t counted = counting ? nbytes : 0;
    auto* header = new (raw) BlockHeader{counted, inner_->raw_deleter()};
    add(counted);
    void* data = header + 1;
    return {data, data, &delete_block, cpu};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &delete_block;
  }

  void copy_data(void* dest, const void* src, size_t count) const override {
    default_copy_data(dest, src, count);
  }

 private:
  c10::Allocator* const inner_;
};

// Allocators are never destroyed: c10 wants static lifetime, and a thread may
// be inside one that was just replaced. One a wrapped allocator, so installing
// again and again does not leak.
std::vector<MeteredAllocator*>& metered_allocators() {
  static auto* const instance = new std::vector<MeteredAllocator*>;
  return *instance;
}

// The meter around this allocator, made if there is none.
MeteredAllocator* meter_around(c10::Allocator* inner) {
  std::vector<MeteredAllocator*>& all = metered_allocators();
  for (MeteredAllocator* metered : all) {
    if (metered->inner() == inner) {
      return metered;
    }
  }
  return all.emplace_back(new MeteredAllocator(inner));
}

// The meter that c10 allocates with; null where it is another allocator.
MeteredAllocator* installed() {
  c10::Allocator* now = c10::GetAllocator(c10::DeviceType::CPU);
  for (MeteredAllocator* metered : metered_allocators()) {
    if (metered == now) {
      return metered;
    }
  }
  return nullptr;
}

void set_cpu_allocator(c10::Allocator* allocator) {
  c10::SetAllocator(c10::DeviceType::CPU, allocator);
  if (c10::GetAllocator(c10::DeviceType::CPU) != allocator) {
    // Someone set theirs with a priority, which only a higher one replaces.
    c10::SetAllocator(c10::DeviceType::CPU, allocator, 255);
  }
}

}  // namespace

void install() {
  c10::Allocator* now = c10::GetAllocator(c10::DeviceType::CPU);
  if (now->raw_deleter() == &delete_block) {
    state().counting.store(true, std::memory_order_relaxed);
    return;
  }
  TORCH_CHECK(
      now->raw_deleter() != nullptr,
      "the CPU allocator in use offers no raw interface, so it cannot be "
      "metered");
  set_cpu_allocator(meter_around(now));
  state().counting.store(true, std::memory_order_relaxed);
}

void uninstall() {
  state().counting.store(false, std::memory_order_relaxed);
  if (MeteredAllocator* metered = installed()) {
    set_cpu_allocator(metered->inner());
  }
}

bool is_around(const c10::Allocator* inner) {
  const MeteredAllocator* metered = installed();
  return metered != nullptr && metered->inner() == inner;
}

int64_t current() {
  return state().current.load(std::memory_order_relaxed);
}

int64_t peak() {
  return state().peak.load(std::memory_order_relaxed);
}

void reset_peak() {
  state().peak.store(current(), std::memory_order_relaxed);
}

bool allocated(size_t nbytes) {
  if (!state().counting.load(std::memory_order_relaxed)) {
    return false;
  }
  add(nbytes);
  return true;
}

void freed(size_t nbytes) {
  subtract(nbytes);
}

}  // namespace zero::meter
