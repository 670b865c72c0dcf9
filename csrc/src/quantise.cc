#include "zero/quantise.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <string>

namespace zero {
namespace {

constexpr int64_t kBlock = 256;
constexpr int64_t kScaleBytes = static_cast<int64_t>(sizeof(float));
constexpr int64_t kGrain = 256;  // blocks that one thread does at a time, at least
constexpr int64_t kAtATime = int64_t{1} << 22;  // numbers, on an accelerator
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kLeastScale = std::numeric_limits<float>::min();
constexpr int32_t kMagnitude = 0x7fffffff;
constexpr int32_t kInfinity = 0x7f800000;
// A float of this size has no bits behind the point: adding it rounds to the
// nearest, ties to even, and leaves the integer in the lowest bits.
constexpr float kRounds = 12582912.0F;

float largest_in(c10::ScalarType wire) {
  return wire == at::kChar ? 127.0F : 448.0F;
}

int64_t blocks_in(int64_t row) {
  return (row + kBlock - 1) / kBlock;
}

int64_t scales_at(int64_t numel) {
  return (numel + kScaleBytes - 1) / kScaleBytes * kScaleBytes;
}

// As c10 converts, for magnitudes up to 448, and without a branch: a loop of it
// becomes vector instructions.
uint8_t as_float8(float x) {
  constexpr int32_t kLeastNormal = 121 << 23;  // 2^-6
  constexpr int32_t kSubnormal = 141 << 23;  // 2^14: whose last bit is 2^-9
  constexpr int32_t kRebias = (127 - 7) << 23;
  const auto bits = std::bit_cast<int32_t>(x);
  const int32_t magnitude = bits & kMagnitude;
  const int32_t small =
      std::bit_cast<int32_t>(
          std::bit_cast<float>(magnitude) + std::bit_cast<float>(kSubnormal)) -
      kSubnormal;
  const int32_t odd = (magnitude >> 20) & 1;  // ties to even
  const int32_t large = (magnitude - kRebias + 0x7FFFF + odd) >> 20;
  const int32_t sign = (bits >> 24) & 0x80;
  return static_cast<uint8_t>(
      (magnitude < kLeastNormal ? small : large) | sign);
}

template <typename T>
void pack_block(
    const T* from,
    int64_t count,
    bool integers,
    float largest,
    uint8_t* to,
    float* scale) {
  float wide[kBlock];
  int32_t top = 0;  // magnitudes compare as their bits do, and NaN is above all
  for (int64_t i = 0; i < count; ++i) {
    wide[i] = static_cast<float>(from[i]);
    top = std::max(top, std::bit_cast<int32_t>(wide[i]) & kMagnitude);
  }
  const auto most = std::bit_cast<float>(top);
  *scale = top >= kInfinity ? kNaN : most / largest;
  if (!(*scale >= kLeastScale)) {
    if (top < kInfinity) {
      *scale = 0.0F;
    }
    std::memset(to, 0, static_cast<size_t>(count));
    return;
  }
  const float by = largest / most;
  if (integers) {
    for (int64_t i = 0; i < count; ++i) {
      to[i] = static_cast<uint8_t>(
          std::bit_cast<int32_t>(wide[i] * by + kRounds));
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      to[i] = as_float8(wide[i] * by);
    }
  }
}

// What each byte means.
std::array<float, 256> values_of(c10::ScalarType wire) {
  std::array<float, 256> values{};
  for (size_t i = 0; i < values.size(); ++i) {
    const auto byte = static_cast<uint8_t>(i);
    values[i] = wire == at::kChar
        ? static_cast<float>(static_cast<int8_t>(byte))
        : c10::detail::fp8e4m3fn_to_fp32_value(byte);
  }
  return values;
}

template <typename T>
void unpack_block(
    const uint8_t* from,
    int64_t count,
    float scale,
    const float* values,
    bool integers,
    T* to) {
  if (integers) {
    for (int64_t i = 0; i < count; ++i) {
      to[i] = static_cast<T>(
          static_cast<float>(static_cast<int8_t>(from[i])) * scale);
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      to[i] = static_cast<T>(values[from[i]] * scale);
    }
  }
}

// Calls body(first number, count, block) for each block of `numel` numbers.
template <typename Body>
void each_block(int64_t numel, int64_t row, Body&& body) {
  const int64_t blocks = blocks_in(row);
  at::parallel_for(
      0, numel / row * blocks, kGrain, [&](int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; ++block) {
          const int64_t at = block % blocks * kBlock;
          body(block / blocks * row + at, std::min(kBlock, row - at), block);
        }
      });
}

template <typename Body>
Status with_type(c10::ScalarType dtype, Body&& body) {
  switch (dtype) {
    case at::kFloat:
      body(float{});
      return {};
    case at::kBFloat16:
      body(c10::BFloat16{});
      return {};
    case at::kHalf:
      body(c10::Half{});
      return {};
    default:
      return Status::error(
          std::string("numbers of ") + c10::toString(dtype) +
          " cannot be quantised");
  }
}

// Of a block, once all blocks of a row are as long as the first.
int64_t width_of(int64_t row) {
  return std::min(kBlock, row);
}

// [rows, blocks, width], with zeros behind the end of a row.
at::Tensor in_blocks(const at::Tensor& rows, int64_t row) {
  const int64_t width = width_of(row);
  const int64_t more = blocks_in(row) * width - row;
  return at::constant_pad_nd(rows, {0, more}).view({-1, blocks_in(row), width});
}

void pack_some(
    const at::Tensor& rows,
    int64_t row,
    c10::ScalarType wire,
    const at::Tensor& numbers,
    const at::Tensor& scales) {
  const auto filled = [&](float value) {
    return at::full({}, value, scales.options());
  };
  const at::Tensor wide = in_blocks(rows.to(at::kFloat), row);
  const at::Tensor most = wide.abs().amax(-1);
  const at::Tensor finite = most.isfinite();
  // Tensors on the device divide: a scalar would be made a factor there.
  const at::Tensor largest = filled(largest_in(wire));
  const at::Tensor found = most.div(largest);
  const at::Tensor usable = finite.logical_and(found.ge(kLeastScale));
  const at::Tensor none = filled(0.0F);
  scales.copy_(
      at::where(usable, found, at::where(finite, none, filled(kNaN)))
          .view(scales.sizes()));
  const at::Tensor by = at::where(usable, largest.div(most), none).unsqueeze(-1);
  at::Tensor scaled = at::where(usable.unsqueeze(-1), wide.mul(by), none);
  if (wire == at::kChar) {
    scaled = scaled.round();
  }
  numbers.copy_(scaled.view({rows.size(0), -1}).narrow(1, 0, row).to(wire));
}

void unpack_some(
    const at::Tensor& numbers,
    int64_t row,
    const at::Tensor& scales,
    const at::Tensor& out) {
  const at::Tensor wide = in_blocks(numbers.to(at::kFloat), row)
                              .mul(scales.view({-1, blocks_in(row), 1}));
  out.copy_(wide.view({numbers.size(0), -1}).narrow(1, 0, row));
}

// Calls body(first row, rows) for some rows at a time.
template <typename Body>
void some_rows(int64_t rows, int64_t row, Body&& body) {
  const int64_t step =
      std::max<int64_t>(1, kAtATime / (blocks_in(row) * width_of(row)));
  for (int64_t at = 0; at < rows; at += step) {
    body(at, std::min(step, rows - at));
  }
}

}  // namespace

bool can_quantise_to(c10::ScalarType wire) {
  return wire == at::kChar || wire == at::kFloat8_e4m3fn;
}

bool can_quantise_from(c10::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

int64_t packed_bytes(int64_t numel, int64_t row) {
  return numel == 0
      ? 0
      : scales_at(numel) + numel / row * blocks_in(row) * kScaleBytes;
}

void pack_by_operators(
    const at::Tensor& chunk,
    int64_t row,
    c10::ScalarType wire,
    const at::Tensor& out) {
  const int64_t numel = chunk.numel();
  const at::Tensor numbers = out.narrow(0, 0, numel).view(wire).view({-1, row});
  const at::Tensor scales =
      out.slice(0, scales_at(numel)).view(at::kFloat).view({numel / row, -1});
  out.slice(0, numel, scales_at(numel)).zero_();
  some_rows(numel / row, row, [&](int64_t at, int64_t rows) {
    pack_some(
        chunk.view({-1, row}).narrow(0, at, rows), row, wire,
        numbers.narrow(0, at, rows), scales.narrow(0, at, rows));
  });
}

void unpack_by_operators(
    const at::Tensor& packed,
    int64_t row,
    c10::ScalarType wire,
    const at::Tensor& out) {
  const int64_t numel = out.numel();
  const at::Tensor numbers =
      packed.narrow(0, 0, numel).view(wire).view({-1, row});
  const at::Tensor scales =
      packed.slice(0, scales_at(numel)).view(at::kFloat).view({numel / row, -1});
  some_rows(numel / row, row, [&](int64_t at, int64_t rows) {
    unpack_some(
        numbers.narrow(0, at, rows), row, scales.narrow(0, at, rows),
        out.view({-1, row}).narrow(0, at, rows));
  });
}

Status pack_rows(
    const at::Tensor& chunk,
    int64_t row,
    c10::ScalarType wire,
    const at::Tensor& out) {
  const int64_t numel = chunk.numel();
  if (numel == 0) {
    return {};
  }
  if (!out.is_cpu()) {
    pack_by_operators(chunk, row, wire, out);
    return {};
  }
  const at::Tensor scales = out.slice(0, scales_at(numel)).view(at::kFloat);
  auto* to = static_cast<uint8_t*>(out.mutable_data_ptr());
  auto* scale = static_cast<float*>(scales.mutable_data_ptr());
  std::memset(to + numel, 0, static_cast<size_t>(scales_at(numel) - numel));
  return with_type(chunk.scalar_type(), [&](auto type) {
    using T = decltype(type);
    const auto* from = static_cast<const T*>(chunk.const_data_ptr());
    each_block(numel, row, [&](int64_t at, int64_t count, int64_t block) {
      pack_block<T>(
          from + at, count, wire == at::kChar, largest_in(wire), to + at,
          scale + block);
    });
  });
}

Status unpack_rows(
    const at::Tensor& packed,
    int64_t row,
    c10::ScalarType wire,
    const at::Tensor& out) {
  const int64_t numel = out.numel();
  if (numel == 0) {
    return {};
  }
  if (!out.is_cpu()) {
    unpack_by_operators(packed, row, wire, out);
    return {};
  }
  const at::Tensor scales = packed.slice(0, scales_at(numel)).view(at::kFloat);
  const auto values = values_of(wire);
  const auto* from = static_cast<const uint8_t*>(packed.const_data_ptr());
  const auto* scale = static_cast<const float*>(scales.const_data_ptr());
  return with_type(out.scalar_type(), [&](auto type) {
    using T = decltype(type);
    auto* to = static_cast<T*>(out.mutable_data_ptr());
    each_block(numel, row, [&](int64_t at, int64_t count, int64_t block) {
      unpack_block<T>(
          from + at, count, scale[block], values.data(), wire == at::kChar,
          to + at);
    });
  });
}

}  // namespace zero
