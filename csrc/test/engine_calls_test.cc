// Calls of the engine in any order, from several threads, and when a peer or a call is lost.

#include <ATen/ops/ones.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engines.h"

namespace {

using at::Tensor;
using zero::Engine;
using zero::GatherSpec;
using zero::test::Hub;
using zero::test::Plan;
using zero::test::add_gather;
using zero::test::add_reduce;
using zero::test::check_equal;
using zero::test::cut;
using zero::test::kCpu;
using zero::test::make_engine;
using zero::test::numbers;
using zero::test::on_ranks;
using zero::test::value_of;

TEST(calls_in_the_wrong_order_change_nothing) {
  on_ranks(2, [](Engine& engine, int rank) {
    const int arena = value_of(engine.add_arena(1 << 12, kCpu));
    Plan plan;
    const int gather =
        add_gather(engine, arena, plan, {{4, 3}}, 2, at::kFloat, "wq, wk");
    const int reduce =
        add_reduce(engine, arena, plan, {{4, 3}}, 2, at::kFloat, "wq, wk");
    const Tensor shard = cut(numbers({4, 3}, 0), 2, rank);
    CHECK_FAILS(engine.gather_wait(gather), "gather 'wq, wk': waited for, but");
    CHECK_FAILS(engine.release(gather), "gather 'wq, wk': released, but");
    CHECK_OK(engine.gather_start(gather, {shard}));
    CHECK_FAILS(engine.gather_start(gather, {shard}), "it is in flight");
    CHECK_FAILS(engine.release(gather), "it is in flight");
    check_equal(value_of(engine.gather_wait(gather))[0], numbers({4, 3}, 0));
    CHECK_FAILS(engine.gather_wait(gather), "waited for already");
    CHECK_FAILS(engine.gather_start(gather, {shard}), "it was not released");
    CHECK_OK(engine.release(gather));
    CHECK_FAILS(engine.release(gather), "it was not started");

    CHECK_FAILS(engine.reduce_wait(reduce), "reduce 'wq, wk': waited for, but");
    CHECK_OK(engine.reduce_start(reduce, {at::ones({4, 3})}));
    CHECK_FAILS(
        engine.reduce_start(reduce, {at::ones({4, 3})}), "it is in flight");
    CHECK_OK(engine.reduce_wait(reduce));
    CHECK_FAILS(engine.reduce_wait(reduce), "it was not started");
    CHECK_FAILS(engine.gather_wait(9), "no gather has the number 9");
    CHECK_FAILS(engine.reduce_wait(-1), "no reduce has the number -1");
  });
}

TEST(plans_that_do_not_fit_are_refused) {
  const auto hub = std::make_shared<Hub>(2);
  const auto engine = make_engine(hub, 0);
  const int arena = value_of(engine->add_arena(256, kCpu));
  GatherSpec spec;
  spec.arena = arena;
  spec.label = "w";
  spec.params.push_back({32, {8, 8}, 0});
  CHECK_OK(engine->add_gather(spec));
  spec.params[0].out_offset = 64;
  CHECK_FAILS(engine->add_gather(spec), "does not fit an arena of 256 bytes");
  spec.params[0] = {8, {16}, 2};
  CHECK_FAILS(engine->add_gather(spec), "not aligned");
  spec.params = {{8, {16}, 0}, {8, {16}, 64}};
  CHECK_FAILS(engine->add_gather(spec), "need a staging area");
  spec.staging_offset = 96;
  CHECK_FAILS(engine->add_gather(spec), "staging: a slot of 48 elements");
  spec.params = {{4, {8}, 0}, {4, {8}, 16}};
  CHECK_FAILS(engine->add_gather(spec), "its slots overlap at offset 16");
  spec.params = {{4, {9}, 0}};
  CHECK_FAILS(engine->add_gather(spec), "do not hold 9 elements");
  spec.params = {};
  CHECK_FAILS(engine->add_gather(spec), "no parameters");
  spec.arena = 3;
  CHECK_FAILS(engine->add_gather(spec), "no arena has the number 3");
  CHECK_EQ(engine->counters().arena_bytes, 0);
}

TEST(a_lost_peer_poisons_the_engine) {
  const auto hub = std::make_shared<Hub>(2);
  const auto engine = make_engine(hub, 0);
  const int arena = value_of(engine->add_arena(1 << 12, kCpu));
  Plan plan;
  const int gather =
      add_gather(*engine, arena, plan, {{4, 3}}, 2, at::kFloat, "wq");
  const int other =
      add_gather(*engine, arena, plan, {{4, 3}}, 2, at::kFloat, "wk");
  const int reduce =
      add_reduce(*engine, arena, plan, {{4, 3}}, 2, at::kFloat, "wq");
  CHECK_OK(engine->gather_start(gather, {at::ones({6})}));
  CHECK_OK(engine->gather_start(other, {at::ones({6})}));
  std::thread killer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    hub->kill(1);
  });
  const std::string reason =
      "gather 'wq' failed on rank 0 of 2 (fake): connection closed by peer 1";
  CHECK_FAILS(engine->gather_wait(gather), reason);
  killer.join();
  CHECK_FAILS(engine->gather_wait(other), reason);
  CHECK_FAILS(engine->release(gather), reason);
  CHECK_FAILS(engine->reduce_start(reduce, {at::ones({4, 3})}), reason);
  CHECK_FAILS(engine->add_arena(64, kCpu), reason);
  CHECK_FAILS(engine->leave(), reason);
  engine->close();
  CHECK_FAILS(engine->gather_wait(other), reason);
}

TEST(a_call_that_broke_off_poisons_where_there_are_peers) {
  const auto hub = std::make_shared<Hub>(2);
  const auto engine = make_engine(hub, 0);
  const int arena = value_of(engine->add_arena(1 << 12, kCpu));
  Plan plan;
  const int gather = add_gather(*engine, arena, plan, {{4, 3}}, 2, at::kFloat);
  CHECK_OK(engine->gather_start(gather, {at::ones({6})}));
  engine->abandon("ValueError: no");
  const std::string reason =
      "an earlier call of the model broke off on rank 0 of 2: ValueError: no";
  CHECK_FAILS(engine->gather_wait(gather), reason);
  engine->abandon("another");
  CHECK_FAILS(engine->gather_start(gather, {at::ones({6})}), reason);
}

TEST(a_call_that_broke_off_is_forgotten_by_a_lone_rank) {
  Engine engine(std::make_unique<zero::LocalTransport>(), 0, 1);
  const int arena = value_of(engine.add_arena(4096, kCpu));
  Plan plan;
  const int gather = add_gather(engine, arena, plan, {{4, 3}}, 1, at::kFloat);
  const int reduce = add_reduce(engine, arena, plan, {{4, 3}}, 1, at::kFloat);
  for (int step = 0; step < 2; ++step) {
    CHECK_OK(engine.gather_start(gather, {at::ones({12})}));
    CHECK_OK(engine.reduce_start(reduce, {at::ones({4, 3})}));
    if (step == 0) {
      engine.abandon("ValueError: no");
    }
  }
  CHECK_OK(engine.gather_wait(gather));
  CHECK_OK(engine.reduce_wait(reduce));
}

// One thread starts, another waits, a third reads the counters.
TEST(starts_and_waits_on_different_threads) {
  constexpr int kSteps = 50;
  on_ranks(2, [](Engine& engine, int rank) {
    const int arena = value_of(engine.add_arena(1 << 14, kCpu));
    Plan plan;
    std::vector<int> gathers;
    for (int i = 0; i < 4; ++i) {
      gathers.push_back(
          add_gather(engine, arena, plan, {{5, 3}, {2}}, 2, at::kFloat));
    }
    const int reduce =
        add_reduce(engine, arena, plan, {{5, 3}, {2}}, 2, at::kFloat);
    std::atomic<int> started{0};
    std::atomic<int> released{0};
    std::atomic<bool> stop{false};
    std::thread starter([&] {
      for (int step = 0; step < kSteps; ++step) {
        while (released < step - 3) {
          std::this_thread::yield();
        }
        (void)engine.gather_start(
            gathers[static_cast<size_t>(step % 4)],
            {cut(numbers({5, 3}, step), 2, rank),
             cut(numbers({2}, step), 2, rank)});
        ++started;
      }
    });
    std::thread reader([&] {
      while (!stop) {
        (void)engine.counters();
        std::this_thread::yield();
      }
    });
    std::string failure;
    try {
      for (int step = 0; step < kSteps; ++step) {
        while (started <= step) {
          std::this_thread::yield();
        }
        const int gather = gathers[static_cast<size_t>(step % 4)];
        const auto full = value_of(engine.gather_wait(gather));
        check_equal(full[0], numbers({5, 3}, step));
        CHECK_OK(engine.release(gather));
        ++released;
      }
    } catch (const std::exception& error) {
      failure = error.what();
      released = kSteps;
    }
    starter.join();
    stop = true;
    reader.join();
    CHECK_EQ(failure, std::string());
    CHECK_OK(engine.reduce_start(reduce, {at::ones({5, 3}), at::ones({2})}));
    CHECK_OK(engine.reduce_wait(reduce));
  });
}

TEST(closing_wakes_nobody_but_hurts_nobody) {
  const auto hub = std::make_shared<Hub>(2);
  const auto engine = make_engine(hub, 0);
  const int arena = value_of(engine->add_arena(1 << 12, kCpu));
  Plan plan;
  const int gather = add_gather(*engine, arena, plan, {{4, 3}, {2}}, 2, at::kFloat);
  CHECK_OK(engine->gather_start(gather, {at::ones({6}), at::ones({1})}));
  std::thread waiter([&] {
    CHECK_FAILS(engine->gather_wait(gather), "the engine is closed");
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  engine->close();
  // The peer comes after all and writes to memory that the engine let go of.
  const auto peer = make_engine(hub, 1);
  const int peer_arena = value_of(peer->add_arena(1 << 12, kCpu));
  Plan peer_plan;
  const int peer_gather =
      add_gather(*peer, peer_arena, peer_plan, {{4, 3}, {2}}, 2, at::kFloat);
  CHECK_OK(peer->gather_start(peer_gather, {at::ones({6}), at::ones({1})}));
  CHECK_OK(peer->gather_wait(peer_gather));
  waiter.join();
}

TEST(an_arena_grows_between_transfers) {
  on_ranks(2, [](Engine& engine, int rank) {
    const int arena = value_of(engine.add_arena(0, kCpu));
    const int staging = value_of(engine.add_arena(0, kCpu));
    CHECK_TRUE(value_of(engine.grow_arena(arena, 1 << 12)));
    CHECK_TRUE(value_of(engine.grow_arena(staging, 1 << 12)));
    CHECK_TRUE(!value_of(engine.grow_arena(arena, 1 << 10)));
    GatherSpec spec;
    spec.arena = arena;
    spec.staging_arena = staging;
    spec.staging_offset = 0;  // the same offset, in another arena
    spec.label = "w";
    spec.params = {{6, {4, 3}, 0}, {1, {2}, 64}};
    const int gather = value_of(engine.add_gather(spec));
    const std::vector<Tensor> shards{
        cut(numbers({4, 3}, 0), 2, rank), cut(numbers({2}, 0), 2, rank)};
    Tensor kept;
    for (int step = 0; step < 3; ++step) {
      CHECK_OK(engine.gather_start(gather, shards));
      CHECK_FAILS(
          engine.grow_arena(arena, 1 << 20),
          "gather 'w': its arena cannot change while it is in flight");
      kept = value_of(engine.gather_wait(gather))[0];
      check_equal(kept, numbers({4, 3}, 0));
      CHECK_FAILS(
          engine.grow_arena(staging, 1 << 20), "while it was not released");
      CHECK_OK(engine.release(gather));
      const int64_t bytes = int64_t{1} << (13 + step);
      CHECK_TRUE(value_of(engine.grow_arena(step == 1 ? staging : arena, bytes)));
      check_equal(kept, numbers({4, 3}, 0));  // the old block is still there
    }
    CHECK_EQ(engine.counters().arena_bytes_planned, (1 << 15) + (1 << 14));
    CHECK_FAILS(engine.grow_arena(7, 1), "no arena has the number 7");
  });
}

TEST(engines_lie_in_one_arena) {
  // Two models of which one Program has parameters: what the one has let go of
  // serves the other.
  const auto alone = [] {
    return std::make_unique<Engine>(
        std::make_unique<zero::LocalTransport>(), 0, 1);
  };
  const auto first = alone();
  const auto second = alone();
  const auto shared = std::make_shared<zero::Arena>(1 << 12, kCpu);
  Tensor seen;
  for (Engine* engine : {first.get(), second.get()}) {
    const int arena = value_of(engine->add_arena(1 << 6, kCpu));
    CHECK_OK(engine->place_arena(arena, shared));
    GatherSpec spec;
    spec.arena = arena;
    spec.dtype = at::kBFloat16;  // a cast, which is made in the arena
    spec.staging_offset = 1 << 11;
    spec.label = "w";
    spec.params = {{12, {4, 3}, 0}};
    const int gather = value_of(engine->add_gather(spec));
    const Tensor full = numbers({4, 3}, engine == first.get() ? 0 : 1);
    CHECK_OK(engine->gather_start(gather, {full.reshape({-1})}));
    CHECK_FAILS(
        engine->place_arena(arena, std::make_shared<zero::Arena>(64, kCpu)),
        "gather 'w': its arena cannot change while it is in flight");
    const Tensor got = value_of(engine->gather_wait(gather))[0];
    check_equal(got, full.to(at::kBFloat16));
    CHECK_TRUE(!seen.defined() || seen.data_ptr() == got.data_ptr());
    seen = got;
    CHECK_OK(engine->release(gather));
    CHECK_EQ(engine->counters().arena_bytes, 1 << 12);
    CHECK_FAILS(engine->place_arena(7, shared), "no arena has the number 7");
  }
  CHECK_EQ(first->counters().arena_allocations, 1);
  CHECK_EQ(second->counters().arena_allocations, 0);
  first->close();
  CHECK_OK(first->place_arena(0, shared));
}

}  // namespace
