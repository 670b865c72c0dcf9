// Engines of ranks that are threads of one process, and plans for them to do.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "fake_transport.h"
#include "ranks.h"
#include "zero/engine.h"

namespace zero::test {

using at::Tensor;
using Sizes = std::vector<int64_t>;

constexpr auto kCpu = c10::DeviceType::CPU;

// Even rows, uneven rows, fewer rows than ranks, a vector, more dimensions.
inline const std::vector<Sizes> kShapes{{6, 4}, {7, 3}, {1, 5}, {5}, {4, 2, 3}};

inline int64_t numel_of(const Sizes& sizes) {
  int64_t numel = 1;
  for (const int64_t size : sizes) {
    numel *= size;
  }
  return numel;
}

inline int64_t chunk_of(const Sizes& sizes, int world) {
  return (sizes[0] + world - 1) / world * (numel_of(sizes) / sizes[0]);
}

// Distinct small integers: exact in every dtype here, also after a sum.
inline Tensor numbers(const Sizes& sizes, int first) {
  return at::arange(first, first + numel_of(sizes)).to(at::kFloat).view(sizes);
}

inline Tensor cut(const Tensor& full, int world, int rank) {
  const int64_t chunk = chunk_of(full.sizes().vec(), world);
  Tensor padded = at::zeros({world * chunk}, full.options());
  padded.narrow(0, 0, full.numel()).copy_(full.reshape({-1}));
  return padded.narrow(0, rank * chunk, chunk).clone();
}

inline void check_equal(const Tensor& got, const Tensor& want) {
  CHECK_EQ(got.scalar_type(), want.scalar_type());
  CHECK_TRUE(got.sizes() == want.sizes());
  CHECK_TRUE(at::equal(got, want));
}

inline std::unique_ptr<Engine> make_engine(const std::shared_ptr<Hub>& hub, int rank) {
  return std::make_unique<Engine>(
      std::make_unique<FakeTransport>(hub, rank), rank, hub->world());
}

// Runs `body(engine, rank)` on every rank; the first failure is thrown.
inline void on_ranks(int world, const std::function<void(Engine&, int)>& body) {
  const auto hub = std::make_shared<Hub>(world);
  on_ranks(
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

inline int add_gather(
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

inline int add_reduce(
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

}  // namespace zero::test
