#include "zero/engine.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_transport.h"
#include "ranks.h"

namespace {

using at::Tensor;
using zero::Engine;
using zero::GatherSpec;
using zero::ReduceSpec;
using zero::test::FakeTransport;
using zero::test::Hub;
using zero::test::value_of;
using Sizes = std::vector<int64_t>;

constexpr auto kCpu = c10::DeviceType::CPU;

// Even rows, uneven rows, fewer rows than ranks, a vector, more dimensions.
const std::vector<Sizes> kShapes{{6, 4}, {7, 3}, {1, 5}, {5}, {4, 2, 3}};

int64_t numel_of(const Sizes& sizes) {
  int64_t numel = 1;
  for (const int64_t size : sizes) {
    numel *= size;
  }
  return numel;
}

int64_t chunk_of(const Sizes& sizes, int world) {
  return (sizes[0] + world - 1) / world * (numel_of(sizes) / sizes[0]);
}

// Distinct small integers: exact in every dtype here, also after a sum.
Tensor numbers(const Sizes& sizes, int first) {
  return at::arange(first, first + numel_of(sizes)).to(at::kFloat).view(sizes);
}

Tensor cut(const Tensor& full, int world, int rank) {
  const int64_t chunk = chunk_of(full.sizes().vec(), world);
  Tensor padded = at::zeros({world * chunk}, full.options());
  padded.narrow(0, 0, full.numel()).copy_(full.reshape({-1}));
  return padded.narrow(0, rank * chunk, chunk).clone();
}

void check_equal(const Tensor& got, const Tensor& want) {
  CHECK_EQ(got.scalar_type(), want.scalar_type());
  CHECK_TRUE(got.sizes() == want.sizes());
  CHECK_TRUE(at::equal(got, want));
}

std::unique_ptr<Engine> make_engine(const std::shared_ptr<Hub>& hub, int rank) {
  return std::make_unique<Engine>(
      std::make_unique<FakeTransport>(hub, rank), rank, hub->world());
}

// Runs `body(engine, rank)` on every rank; the first failure is thrown.
void on_ranks(int world, const std::function<void(Engine&, int)>& body) {
  const auto hub = std::make_shared<Hub>(world);
  zero::test::on_ranks(
      world, [&](int rank) { body(*make_engine(hub, rank), rank); },
      [&](int rank) { hub->kill(rank); });
}

// Lays slots one after the other, 64 bytes apart at least.
struct Plan {
  int64_t end = 0;
  int64_t take(int64_t nbytes) {
    const int64_t offset = end;
    end += (nbytes + 63) / 64 * 64;
    return offset;
  }
};

int add_gather(
    Engine& engine,
    int arena,
    Plan& plan,
    const std::vector<Sizes>& shapes,
    int world,
    c10::ScalarType dtype,
    const std::string& label = "w") {
  const auto size = static_cast<int64_t>(c10::elementSize(dtype));
  GatherSpec spec;
  spec.arena = arena;
  spec.dtype = dtype;
  spec.label = label;
  int64_t total = 0;
  for (const Sizes& sizes : shapes) {
    const int64_t chunk = chunk_of(sizes, world);
    spec.params.push_back({chunk, sizes, plan.take(world * chunk * size)});
    total += chunk;
  }
  spec.staging_offset =
      plan.take((shapes.size() > 1 ? total * (world + 1) : total) * size);
  return value_of(engine.add_gather(spec));
}

int add_reduce(
    Engine& engine,
    int arena,
    Plan& plan,
    const std::vector<Sizes>& shapes,
    int world,
    c10::ScalarType out_dtype,
    const std::string& label = "w") {
  ReduceSpec spec;
  spec.arena = arena;
  spec.label = label;
  spec.out_dtype = out_dtype;
  spec.divisor = world;
  int64_t total = 0;
  for (const Sizes& sizes : shapes) {
    spec.params.push_back({chunk_of(sizes, world), sizes});
    total += spec.params.back().chunk_numel;
  }
  spec.staging_offset = plan.take(total * (world + 1) * 4);
  return value_of(engine.add_reduce(spec));
}

TEST(gathers_give_the_full_tensors) {
  for (const int world : {2, 3, 5}) {
    on_ranks(world, [&](Engine& engine, int rank) {
      const int arena = value_of(engine.add_arena(1 << 16, kCpu));
      Plan plan;
      const int bucket =
          add_gather(engine, arena, plan, kShapes, world, at::kFloat);
      const int narrow =
          add_gather(engine, arena, plan, kShapes, world, at::kBFloat16);
      std::vector<int> alone;
      std::vector<int> alone_narrow;
      for (const Sizes& sizes : kShapes) {
        alone.push_back(
            add_gather(engine, arena, plan, {sizes}, world, at::kFloat));
        alone_narrow.push_back(
            add_gather(engine, arena, plan, {sizes}, world, at::kBFloat16));
      }
      std::vector<Tensor> seen;
      for (int step = 0; step < 3; ++step) {
        std::vector<Tensor> fulls;
        std::vector<Tensor> shards;
        for (size_t i = 0; i < kShapes.size(); ++i) {
          fulls.push_back(numbers(kShapes[i], 30 * step + static_cast<int>(i)));
          shards.push_back(cut(fulls[i], world, rank));
        }
        CHECK_OK(engine.gather_start(bucket, shards));
        for (size_t i = 0; i < kShapes.size(); ++i) {
          CHECK_OK(engine.gather_start(alone[i], {shards[i]}));
          CHECK_OK(engine.gather_start(alone_narrow[i], {shards[i]}));
        }
        CHECK_OK(engine.gather_start(narrow, shards));
        const auto cast = value_of(engine.gather_wait(narrow));
        for (size_t i = kShapes.size(); i-- > 0;) {
          check_equal(value_of(engine.gather_wait(alone[i]))[0], fulls[i]);
          check_equal(
              value_of(engine.gather_wait(alone_narrow[i]))[0],
              fulls[i].to(at::kBFloat16));
          check_equal(cast[i], fulls[i].to(at::kBFloat16));
          CHECK_OK(engine.release(alone[i]));
          CHECK_OK(engine.release(alone_narrow[i]));
        }
        const auto full = value_of(engine.gather_wait(bucket));
        for (size_t i = 0; i < kShapes.size(); ++i) {
          check_equal(full[i], fulls[i]);
          CHECK_TRUE(step == 0 || full[i].is_same(seen[i]));
        }
        seen = full;
        CHECK_OK(engine.release(bucket));
        CHECK_OK(engine.release(narrow));
      }
      CHECK_EQ(engine.counters().allocations, 1);
      CHECK_EQ(engine.counters().arena_bytes, 1 << 16);
    });
  }
}

TEST(a_lone_gather_reads_the_shard_where_it_lies) {
  on_ranks(2, [](Engine& engine, int rank) {
    const int arena = value_of(engine.add_arena(4096, kCpu));
    GatherSpec spec;
    spec.arena = arena;
    spec.label = "wq";
    spec.params.push_back({6, {4, 3}, 64});
    const int gather = value_of(engine.add_gather(spec));
    CHECK_OK(engine.gather_start(gather, {cut(numbers({4, 3}, 0), 2, rank)}));
    check_equal(value_of(engine.gather_wait(gather))[0], numbers({4, 3}, 0));
    CHECK_OK(engine.release(gather));
    // There is no staging area, which only a cast would need.
    CHECK_FAILS(
        engine.gather_start(gather, {at::ones({6}).to(at::kBFloat16)}),
        "gather 'wq': a cast needs a staging area");
  });
}

void check_reductions(int world, c10::ScalarType grads_in, c10::ScalarType out) {
  on_ranks(world, [&](Engine& engine, int rank) {
    const int arena = value_of(engine.add_arena(1 << 16, kCpu));
    Plan plan;
    const int bucket = add_reduce(engine, arena, plan, kShapes, world, out);
    std::vector<int> alone;
    for (const Sizes& sizes : kShapes) {
      alone.push_back(add_reduce(engine, arena, plan, {sizes}, world, out));
    }
    int64_t warm = 0;
    for (int step = 0; step < 4; ++step) {
      std::vector<Tensor> mine;
      std::vector<Tensor> want;
      for (size_t i = 0; i < kShapes.size(); ++i) {
        Tensor sum;
        for (int k = 0; k < world; ++k) {
          const Tensor grad =
              numbers(kShapes[i], 7 * k + 3 * step).to(grads_in);
          sum = k == 0 ? grad.to(at::kFloat) : sum.add(grad.to(at::kFloat));
          if (k == rank) {
            mine.push_back(grad.clone());
          }
        }
        const Tensor divisor = at::full({}, static_cast<double>(world));
        want.push_back(cut(sum.div(divisor), world, rank).to(out));
        if (step == 3 && mine[i].dim() > 1) {  // the same, laid out otherwise
          mine[i] = mine[i].transpose(0, 1).contiguous().transpose(0, 1);
        }
      }
      std::vector<Tensor> before;
      for (const Tensor& grad : mine) {
        before.push_back(grad.clone());
      }
      CHECK_OK(engine.reduce_start(bucket, mine));
      for (size_t i = 0; i < alone.size(); ++i) {
        CHECK_OK(engine.reduce_start(alone[i], {mine[i]}));
      }
      for (size_t i = alone.size(); i-- > 0;) {
        check_equal(value_of(engine.reduce_wait(alone[i]))[0], want[i]);
      }
      const auto chunks = value_of(engine.reduce_wait(bucket));
      for (size_t i = 0; i < kShapes.size(); ++i) {
        check_equal(chunks[i], want[i]);
        check_equal(mine[i], before[i]);
      }
      if (step == 0) {
        warm = engine.counters().allocations;
      }
      CHECK_EQ(engine.counters().allocations, warm);
    }
    CHECK_TRUE(engine.counters().recycled > 0);
  });
}

TEST(reductions_give_the_mean) {
  for (const int world : {2, 3, 5}) {
    check_reductions(world, at::kFloat, at::kFloat);
  }
}

TEST(reductions_cast_before_the_sum_and_after_the_division) {
  for (const int world : {2, 3}) {
    check_reductions(world, at::kBFloat16, at::kBFloat16);
    check_reductions(world, at::kBFloat16, at::kFloat);
  }
}

// Three rows on two ranks, and what lay in the staging area before is not a
// number: the pad row must come out as zero each time.
TEST(padding_is_zero_every_time) {
  on_ranks(2, [](Engine& engine, int rank) {
    const int arena = value_of(engine.add_arena(1 << 12, kCpu));
    Plan plan;
    const int first =
        add_reduce(engine, arena, plan, {{4, 2}, {2}}, 2, at::kFloat);
    Plan same_place;
    const int second =
        add_reduce(engine, arena, same_place, {{3, 2}, {1}}, 2, at::kFloat);
    const Tensor nan =
        at::full({4, 2}, std::numeric_limits<double>::quiet_NaN());
    for (int step = 0; step < 2; ++step) {
      CHECK_OK(engine.reduce_start(first, {nan, at::ones({2})}));
      CHECK_TRUE(std::isnan(
          value_of(engine.reduce_wait(first))[0].sum().item<float>()));
      CHECK_OK(engine.reduce_start(second, {at::ones({3, 2}), at::ones({1})}));
      const auto chunks = value_of(engine.reduce_wait(second));
      CHECK_EQ(chunks[0].sum().item<float>(), rank == 0 ? 4.0F : 2.0F);
      CHECK_EQ(chunks[1].sum().item<float>(), rank == 0 ? 1.0F : 0.0F);
    }
  });
}

TEST(replicated_gradients_are_all_reduced) {
  on_ranks(3, [](Engine& engine, int rank) {
    const int arena = value_of(engine.add_arena(1 << 12, kCpu));
    ReduceSpec spec;
    spec.arena = arena;
    spec.label = "scales";
    spec.replicated = true;
    spec.divisor = 3.0;
    spec.staging_offset = 0;
    spec.params = {{1, {}}, {0, {0, 4}}, {4, {2, 2}}};
    const int bucket = value_of(engine.add_reduce(spec));
    spec.params = {{1, {}}};
    spec.staging_offset = -1;
    const int alone = value_of(engine.add_reduce(spec));
    const Tensor scalar = at::full({}, rank);
    for (int step = 0; step < 2; ++step) {
      CHECK_OK(engine.reduce_start(
          bucket,
          {scalar.to(at::kFloat), at::ones({0, 4}), at::full({2, 2}, 2.0)}));
      CHECK_OK(engine.reduce_start(alone, {scalar.to(at::kFloat)}));
      const auto all = value_of(engine.reduce_wait(bucket));
      check_equal(all[0], at::full({}, 1.0));
      check_equal(all[1], at::ones({0, 4}));
      check_equal(all[2], at::full({2, 2}, 2.0));
      check_equal(value_of(engine.reduce_wait(alone))[0], at::full({}, 1.0));
    }
  });
}

TEST(a_lone_gradient_needs_a_staging_area_only_to_be_rearranged) {
  on_ranks(2, [](Engine& engine, int rank) {
    const int arena = value_of(engine.add_arena(0, kCpu));
    ReduceSpec spec;
    spec.arena = arena;
    spec.label = "wq";
    spec.divisor = 2.0;
    spec.params = {{6, {4, 3}}};
    const int reduce = value_of(engine.add_reduce(spec));
    CHECK_OK(engine.reduce_start(reduce, {numbers({4, 3}, rank)}));
    check_equal(
        value_of(engine.reduce_wait(reduce))[0],
        cut(numbers({4, 3}, 0).add(numbers({4, 3}, 1)).div(2), 2, rank));
    CHECK_FAILS(
        engine.reduce_start(reduce, {numbers({3, 4}, 0).t()}),
        "needs a staging area");
  });
}

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
          "gather 'w': its arena cannot grow while it is in flight");
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

TEST(one_rank_moves_nothing) {
  Engine engine(std::make_unique<zero::LocalTransport>(), 0, 1);
  const int arena = value_of(engine.add_arena(4096, kCpu));
  GatherSpec spec;
  spec.arena = arena;
  spec.label = "w";
  spec.params = {{12, {4, 3}, 0}, {2, {2}, 64}};
  const int gather = value_of(engine.add_gather(spec));
  const Tensor shard = numbers({12}, 0);
  CHECK_OK(engine.gather_start(gather, {shard, at::ones({2})}));
  const auto full = value_of(engine.gather_wait(gather));
  CHECK_TRUE(full[0].data_ptr() == shard.data_ptr());
  check_equal(full[0], numbers({4, 3}, 0));
  CHECK_OK(engine.release(gather));
  ReduceSpec reduce_spec;
  reduce_spec.arena = arena;
  reduce_spec.label = "w";
  reduce_spec.params = {{12, {4, 3}}};
  const int reduce = value_of(engine.add_reduce(reduce_spec));
  const Tensor grad = numbers({4, 3}, 0);
  CHECK_OK(engine.reduce_start(reduce, {grad}));
  const auto chunk = value_of(engine.reduce_wait(reduce));
  CHECK_TRUE(chunk[0].data_ptr() == grad.data_ptr());
  CHECK_EQ(engine.counters().allocations, 0);
}

}  // namespace
