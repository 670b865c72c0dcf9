#include "zero/sum.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <type_traits>

namespace zero {
namespace {

// Elements summed at a time: what is added up stays in the first-level cache.
constexpr int64_t kBlock = 2048;
constexpr int64_t kGrain = 64 * 1024;

// The type in which one addition of T is made, before it is rounded to T.
template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T>
bool divides_exactly(double divisor) {
  // A power of two: multiplying by the reciprocal gives the same bits.
  int exponent = 0;
  return std::frexp(divisor, &exponent) == 0.5 && std::abs(exponent) < 60;
}

template <typename T, typename Out>
void sum_range(
    const std::vector<const void*>& parts,
    double divisor,
    Out* out,
    int64_t begin,
    int64_t end) {
  const auto by = static_cast<Wide<T>>(divisor);
  const auto reciprocal = static_cast<Wide<T>>(1.0 / divisor);
  const bool exact = divides_exactly<T>(divisor);
  T total[kBlock];
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t count = std::min(kBlock, end - at);
    const T* first = static_cast<const T*>(parts[0]) + at;
    if (parts.size() == 1) {
      std::copy(first, first + count, total);
    }
    for (size_t k = 1; k < parts.size(); ++k) {
      const T* left = k == 1 ? first : total;
      const T* __restrict right = static_cast<const T*>(parts[k]) + at;
      for (int64_t i = 0; i < count; ++i) {
        total[i] = static_cast<T>(
            static_cast<Wide<T>>(left[i]) + static_cast<Wide<T>>(right[i]));
      }
    }
    Out* __restrict to = out + at;
    // The quotient is rounded to T before it is cast.
    if (exact) {
      for (int64_t i = 0; i < count; ++i) {
        to[i] = static_cast<Out>(static_cast<Wide<Out>>(static_cast<T>(
            static_cast<Wide<T>>(total[i]) * reciprocal)));
      }
    } else {
      for (int64_t i = 0; i < count; ++i) {
        to[i] = static_cast<Out>(static_cast<Wide<Out>>(
            static_cast<T>(static_cast<Wide<T>>(total[i]) / by)));
      }
    }
  }
}

template <typename Body>
Status with_type(c10::ScalarType dtype, Body&& body) {
  switch (dtype) {
    case at::kFloat:
      body(float{});
      return {};
    case at::kDouble:
      body(double{});
      return {};
    case at::kBFloat16:
      body(c10::BFloat16{});
      return {};
    case at::kHalf:
      body(c10::Half{});
      return {};
    default:
      return Status::error(
          std::string("gradients cannot be summed in ") + c10::toString(dtype));
  }
}

}  // namespace

Status sum_parts(
    const std::vector<const void*>& parts,
    c10::ScalarType dtype,
    double divisor,
    const at::Tensor& out) {
  Status inner;
  Status outer = with_type(dtype, [&](auto type) {
    using T = decltype(type);
    inner = with_type(out.scalar_type(), [&](auto out_type) {
      using Out = decltype(out_type);
      auto* data = static_cast<Out*>(out.mutable_data_ptr());
      at::parallel_for(0, out.numel(), kGrain, [&](int64_t begin, int64_t end) {
        sum_range<T, Out>(parts, divisor, data, begin, end);
      });
    });
  });
  return outer.ok() ? inner : outer;
}

}  // namespace zero
