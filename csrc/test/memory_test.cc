// Arenas, the pool of gradients and the allocator meter.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>

#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "zero/alloc_meter.h"
#include "zero/arena.h"
#include "zero/recycler.h"

namespace {

using at::Tensor;
using zero::test::value_of;

constexpr auto kCpu = c10::DeviceType::CPU;

struct Metered {
  Metered() {
    zero::meter::install();
  }
  ~Metered() {
    zero::meter::uninstall();
  }
  int64_t before = zero::meter::current();
  int64_t live() const {
    return zero::meter::current() - before;
  }
};

Tensor bytes(int64_t count) {
  return at::empty({count}, at::TensorOptions(at::kByte));
}

TEST(an_arena_is_allocated_when_first_used_and_lives_with_its_slots) {
  const Metered meter;
  Tensor slot;
  {
    zero::Arena arena(16 << 20, kCpu);
    CHECK_EQ(meter.live(), 0);
    slot = value_of(arena.slice(4096, 8, at::kFloat));
    CHECK_EQ(meter.live(), 16 << 20);
    CHECK_EQ(reinterpret_cast<uintptr_t>(slot.data_ptr()) % 4096, 0U);
    const Tensor same = value_of(arena.slice(4096, 16, at::kBFloat16));
    CHECK_TRUE(same.data_ptr() == slot.data_ptr());
    CHECK_TRUE(!same.is_alias_of(slot));
    CHECK_FAILS(arena.slice(0, 1 << 24, at::kFloat), "does not fit");
    CHECK_FAILS(arena.slice(-4, 1, at::kFloat), "does not fit");
    CHECK_FAILS(arena.slice(2, 1, at::kFloat), "not aligned");
    CHECK_FAILS(
        arena.slice(0, INT64_MAX / 2, at::kDouble), "does not fit");
    CHECK_OK(arena.slice(16 << 20, 0, at::kFloat));
  }
  CHECK_EQ(meter.live(), 16 << 20);
  slot.fill_(1.0);
  slot.reset();
  CHECK_EQ(meter.live(), 0);
}

TEST(an_arena_that_cannot_be_had_is_an_error) {
  zero::Arena arena(int64_t{1} << 60, kCpu);
  CHECK_FAILS(arena.slice(0, 1, at::kFloat), "could not be allocated");
}

TEST(the_pool_hands_out_what_nobody_holds) {
  zero::Recycler pool;
  pool.expect(40, kCpu);
  Tensor first = pool.acquire({10}, at::kFloat, kCpu);
  const void* address = first.data_ptr();
  const Tensor view = first.narrow(0, 2, 3);
  first.reset();
  Tensor second = pool.acquire({10}, at::kFloat, kCpu);
  CHECK_TRUE(second.data_ptr() != address);
  CHECK_EQ(pool.allocations(), 2);
  second.reset();
  Tensor third = pool.acquire({2, 5}, at::kInt, kCpu);
  CHECK_EQ(pool.allocations(), 2);
  CHECK_TRUE(third.is_contiguous() && third.dim() == 2);
  // Another size, and nothing at all, never match.
  CHECK_EQ(pool.acquire({11}, at::kFloat, kCpu).numel(), 11);
  CHECK_EQ(pool.acquire({0, 3}, at::kFloat, kCpu).numel(), 0);
  CHECK_EQ(pool.allocations(), 3);
}

TEST(the_pool_does_not_hand_out_a_storage_that_was_resized) {
  zero::Recycler pool;
  pool.expect(40, kCpu);
  Tensor first = pool.acquire({10}, at::kFloat, kCpu);
  first.resize_({100});
  first.reset();
  CHECK_EQ(pool.acquire({10}, at::kFloat, kCpu).numel(), 10);
  CHECK_EQ(pool.allocations(), 2);
}

TEST(the_pool_forgets_what_is_held_for_ever) {
  const Metered meter;
  zero::Recycler pool;
  pool.expect(4000, kCpu);
  std::vector<Tensor> held;
  for (int i = 0; i < 20; ++i) {
    held.push_back(pool.acquire({1000}, at::kFloat, kCpu));
  }
  CHECK_EQ(meter.live(), 20 * 4000);
  held.clear();
  CHECK_EQ(meter.live(), 2 * 4000);
  pool.clear();
  CHECK_EQ(meter.live(), 0);
}

TEST(the_pool_gives_back_what_waits_before_it_takes_more) {
  const Metered meter;
  zero::Recycler pool;
  for (const int64_t nbytes : {400, 4000, 4000}) {
    pool.expect(nbytes, kCpu);
  }
  pool.trim(400);
  pool.acquire({1000}, at::kFloat, kCpu);
  pool.acquire({1000}, at::kFloat, kCpu);  // the same once more
  CHECK_EQ(pool.allocations(), 1);
  pool.acquire({100}, at::kFloat, kCpu);
  CHECK_EQ(meter.live(), 400);
  Tensor held = pool.acquire({1000}, at::kFloat, kCpu);
  CHECK_EQ(meter.live(), 4400);  // so much may wait
  pool.trim(-1);
  pool.acquire({1000}, at::kFloat, kCpu);
  pool.acquire({100}, at::kFloat, kCpu);
  CHECK_EQ(meter.live(), 8400);
  CHECK_EQ(pool.allocations(), 4);
}

TEST(a_pool_without_room_takes_what_is_there_at_once) {
  const Metered meter;
  zero::Recycler pool(0);
  for (const int64_t nbytes : {4000, 4000, 400}) {
    pool.expect(nbytes, kCpu);
  }
  Tensor held = pool.acquire({1000}, at::kFloat, kCpu);
  pool.acquire({1000}, at::kFloat, kCpu);
  CHECK_EQ(meter.live(), 8000);
  pool.acquire({1000}, at::kFloat, kCpu);  // the same once more
  CHECK_EQ(pool.allocations(), 2);
  Tensor small = pool.acquire({100}, at::kFloat, kCpu);  // in place of that
  CHECK_EQ(meter.live(), 4400);
  held.reset();
  small.reset();
  CHECK_EQ(pool.trim(0).size(), size_t{2});
  CHECK_EQ(meter.live(), 0);
}

TEST(the_pool_gives_back_what_nobody_holds) {
  const Metered meter;
  zero::Recycler pool;
  for (const int64_t nbytes : {400, 4000, 4000}) {
    pool.expect(nbytes, kCpu);
  }
  Tensor held = pool.acquire({1000}, at::kFloat, kCpu);
  for (const int64_t numel : {1000, 100}) {
    pool.acquire({numel}, at::kFloat, kCpu);
  }
  CHECK_EQ(meter.live(), 8400);
  CHECK_TRUE(pool.trim(4400).empty());
  CHECK_EQ(pool.trim(4399).size(), size_t{1});  // the larger one
  CHECK_EQ(meter.live(), 4400);
  held.fill_(1.0);
  CHECK_EQ(pool.trim(0).size(), size_t{1});
  CHECK_EQ(meter.live(), 4000);
  // What is left serves on.
  held.reset();
  CHECK_EQ(pool.acquire({1000}, at::kFloat, kCpu).numel(), 1000);
  CHECK_EQ(pool.allocations(), 3);
}

TEST(the_pool_serves_tensors_dropped_on_other_threads) {
  zero::Recycler pool;
  pool.expect(4000, kCpu);
  for (int step = 0; step < 100; ++step) {
    Tensor tensor = pool.acquire({1000}, at::kFloat, kCpu);
    static_cast<float*>(tensor.data_ptr())[step] = 1.0F;
    std::thread([tensor = std::move(tensor), step]() mutable {
      static_cast<float*>(tensor.data_ptr())[step] += 1.0F;
      tensor.reset();
    }).join();
  }
  CHECK_EQ(pool.allocations(), 1);
}

TEST(the_meter_counts_exactly_from_any_thread) {
  const Metered meter;
  std::vector<Tensor> handed_over;
  for (int i = 0; i < 8; ++i) {
    handed_over.push_back(bytes(1000 + i));
  }
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&handed_over, t] {
      handed_over[static_cast<size_t>(2 * t)].reset();
      for (int i = 1; i < 500; ++i) {
        Tensor tensor = bytes(i);
        static_cast<char*>(tensor.data_ptr())[i - 1] = 1;
      }
      handed_over[static_cast<size_t>(2 * t + 1)].reset();
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK_EQ(meter.live(), 0);
}

TEST(blocks_outlive_the_meter) {
  Tensor early = bytes(100);
  Tensor inside;
  {
    const Metered meter;
    inside = bytes(200);
    early.reset();
    CHECK_EQ(meter.live(), 200);
    zero::meter::reset_peak();
    bytes(50);
    CHECK_EQ(zero::meter::peak() - meter.before, 250);
  }
  const int64_t before = zero::meter::current();
  const Tensor late = bytes(300);
  CHECK_EQ(zero::meter::current(), before);
  inside.reset();
  CHECK_EQ(zero::meter::current(), before - 200);
}

}  // namespace

int main(int argc, char** argv) {
  return check::run_all(argc, argv);
}
