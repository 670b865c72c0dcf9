// What gathers and reductions give, to every rank.

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "engines.h"

namespace {

using at::Tensor;
using zero::Engine;
using zero::GatherSpec;
using zero::ReduceSpec;
using zero::test::Plan;
using zero::test::Sizes;
using zero::test::add_gather;
using zero::test::add_reduce;
using zero::test::check_equal;
using zero::test::cut;
using zero::test::kCpu;
using zero::test::kShapes;
using zero::test::numbers;
using zero::test::on_ranks;
using zero::test::value_of;

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
