// Weights that travel in 8 bits: what every rank gets, and two ways to the same bits.

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/randn.h>

#include <cstring>
#include <limits>
#include <vector>

#include "engines.h"
#include "zero/quantise.h"

namespace {

using at::Tensor;
using zero::Engine;
using zero::GatherSpec;
using zero::pack_by_operators;
using zero::pack_rows;
using zero::packed_bytes;
using zero::unpack_by_operators;
using zero::unpack_rows;
using zero::test::chunk_of;
using zero::test::cut;
using zero::test::kCpu;
using zero::test::kShapes;
using zero::test::numel_of;
using zero::test::on_ranks;
using zero::test::Plan;
using zero::test::Sizes;
using zero::test::value_of;

const std::vector<c10::ScalarType> kWires{at::kChar, at::kFloat8_e4m3fn};

int64_t row_of(const Sizes& sizes) {
  return numel_of(sizes) / sizes[0];
}

bool same_bytes(const Tensor& one, const Tensor& other) {
  return one.nbytes() == other.nbytes() &&
      std::memcmp(one.const_data_ptr(), other.const_data_ptr(), one.nbytes()) == 0;
}

Tensor packed(const Tensor& chunk, int64_t row, c10::ScalarType wire) {
  const Tensor out = at::empty({packed_bytes(chunk.numel(), row)}, at::kByte);
  CHECK_OK(pack_rows(chunk, row, wire, out));
  return out;
}

// Rows of zeros, of what has no normal scale, and of what is not finite, among others.
Tensor odd_numbers(int64_t rows, int64_t row) {
  Tensor x = at::randn({rows, row});
  x.select(0, 0).zero_();
  if (rows > 4) {
    x[1][0] = std::numeric_limits<float>::infinity();
    x[2][row - 1] = std::numeric_limits<float>::quiet_NaN();
    x.select(0, 3).mul_(1e-40);
    x.select(0, 4).mul_(1e30);
  }
  return x.view({-1});
}

TEST(torchs_operators_pack_the_same_bytes) {
  for (const auto wire : kWires) {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      for (const int64_t row : {1, 3, 256, 257, 700}) {
        const Tensor x = odd_numbers(7, row).to(dtype);
        const Tensor mine = packed(x, row, wire);
        const Tensor theirs = at::full_like(mine, 0xEE);
        pack_by_operators(x, row, wire, theirs);
        const int64_t at = (x.numel() + 3) / 4 * 4;
        CHECK_TRUE(same_bytes(mine.slice(0, 0, at), theirs.slice(0, 0, at)));
        // A NaN has many bits.
        const Tensor scales = mine.slice(0, at).view(at::kFloat);
        const Tensor others = theirs.slice(0, at).view(at::kFloat);
        CHECK_TRUE(at::equal(scales.isnan(), others.isnan()));
        CHECK_TRUE(at::equal(scales.nan_to_num(), others.nan_to_num()));

        const Tensor out = at::empty_like(x);
        const Tensor other = at::empty_like(x);
        CHECK_OK(unpack_rows(mine, row, wire, out));
        unpack_by_operators(mine, row, wire, other);
        CHECK_TRUE(at::equal(out.isnan(), other.isnan()));
        CHECK_TRUE(at::equal(out.nan_to_num(), other.nan_to_num()));
      }
    }
  }
}

int add_quantised(
    Engine& engine,
    int arena,
    Plan& plan,
    const std::vector<Sizes>& shapes,
    int world,
    c10::ScalarType dtype,
    c10::ScalarType wire) {
  GatherSpec spec;
  spec.arena = arena;
  spec.dtype = dtype;
  spec.label = "w";
  spec.wire = wire;
  int64_t sent = 0;
  for (const Sizes& sizes : shapes) {
    const int64_t chunk = chunk_of(sizes, world);
    const auto size = static_cast<int64_t>(c10::elementSize(dtype));
    spec.params.push_back({chunk, sizes, plan.take(world * chunk * size)});
    sent += packed_bytes(chunk, row_of(sizes));
  }
  spec.staging_offset = plan.take(sent * (world + 1));
  return value_of(engine.add_gather(spec));
}

TEST(every_rank_gets_what_each_has_packed) {
  std::vector<Sizes> shapes = kShapes;
  shapes.push_back({9, 600});
  for (const int world : {2, 3, 5}) {
    for (const auto wire : kWires) {
      on_ranks(world, [&](Engine& engine, int rank) {
        const int arena = value_of(engine.add_arena(1 << 18, kCpu));
        Plan plan;
        for (const auto dtype : {at::kFloat, at::kBFloat16}) {
          std::vector<Tensor> fulls;
          std::vector<Tensor> shards;
          for (const Sizes& sizes : shapes) {
            fulls.push_back(zero::test::numbers(sizes, 1).mul(0.37));
            shards.push_back(cut(fulls.back(), world, rank));
          }
          const int bucket =
              add_quantised(engine, arena, plan, shapes, world, dtype, wire);
          for (int step = 0; step < 2; ++step) {
            CHECK_OK(engine.gather_start(bucket, shards));
            const auto got = value_of(engine.gather_wait(bucket));
            for (size_t i = 0; i < shapes.size(); ++i) {
              const int64_t row = row_of(shapes[i]);
              // Rows alone decide what they become: the whole, packed here, is the same.
              const Tensor want =
                  at::empty({fulls[i].numel()}, at::TensorOptions(dtype));
              CHECK_OK(unpack_rows(
                  packed(fulls[i].reshape({-1}).contiguous(), row, wire), row,
                  wire, want));
              CHECK_TRUE(at::equal(got[i], want.view(shapes[i])));
            }
            CHECK_OK(engine.release(bucket));
          }
        }
        int64_t sent = 0;
        for (const Sizes& sizes : shapes) {
          sent += packed_bytes(chunk_of(sizes, world), row_of(sizes));
        }
        CHECK_EQ(engine.counters().bytes_gathered, 4 * world * sent);
      });
    }
  }
}

TEST(what_cannot_travel_quantised_is_refused) {
  on_ranks(2, [](Engine& engine, int) {
    const int arena = value_of(engine.add_arena(1 << 12, kCpu));
    GatherSpec spec;
    spec.arena = arena;
    spec.label = "w";
    spec.params = {{8, {4, 4}, 0}};
    spec.staging_offset = 256;
    spec.wire = at::kInt;
    CHECK_FAILS(engine.add_gather(spec), "weights of Float cannot travel in Int");
    spec.wire = at::kChar;
    spec.dtype = at::kDouble;
    CHECK_FAILS(engine.add_gather(spec), "weights of Double cannot travel in Char");
    spec.dtype = at::kFloat;
    spec.staging_offset = -1;
    CHECK_FAILS(engine.add_gather(spec), "need a staging area, at a multiple");
    spec.staging_offset = 258;
    CHECK_FAILS(engine.add_gather(spec), "need a staging area, at a multiple");
    spec.staging_offset = 4096 - 8;
    CHECK_FAILS(engine.add_gather(spec), "staging: ");
    spec.staging_offset = 16;  // the slot has 64 bytes
    CHECK_FAILS(engine.add_gather(spec), "its slots overlap");
  });
  on_ranks(1, [](Engine& engine, int) {
    GatherSpec spec;
    spec.arena = value_of(engine.add_arena(1 << 12, kCpu));
    spec.params = {{16, {4, 4}, 0}};
    spec.staging_offset = 256;
    spec.wire = at::kChar;
    CHECK_FAILS(engine.add_gather(spec), "nothing is sent that could travel");
  });
}

}  // namespace
