#include "zero/transport.h"

#include <ATen/core/Tensor.h>

#include <exception>
#include <utility>
#include <vector>

namespace zero {
namespace {

// The work is done when the handle is made.
class DoneHandle final : public Handle {
 public:
  Status wait() override {
    return {};
  }
};

template <typename Copy>
StartResult done_after(Copy&& copy) {
  try {
    std::forward<Copy>(copy)();
  } catch (const std::exception& error) {
    return Status::error(error.what());
  }
  return StartResult(std::make_unique<DoneHandle>());
}

}  // namespace

StartResult Transport::start_all_to_all(
    const at::Tensor& /*in*/,
    const at::Tensor& /*out*/) {
  return Status::error(name() + " has no all-to-all");
}

StartResult Transport::start_packed_reduce_scatter(
    const at::Tensor& /*in*/,
    const at::Tensor& /*out*/,
    c10::ScalarType /*wire*/,
    std::vector<Rows> /*parts*/) {
  return Status::error(name() + " does not tell hosts apart");
}

std::string LocalTransport::name() const {
  return "local";
}

StartResult LocalTransport::start_all_gather(
    const at::Tensor& in,
    const at::Tensor& out) {
  return done_after([&] { out.copy_(in); });
}

StartResult LocalTransport::start_reduce_scatter(
    const at::Tensor& in,
    const at::Tensor& out) {
  return done_after([&] { out.copy_(in); });
}

StartResult LocalTransport::start_all_reduce(const at::Tensor& /*inout*/) {
  return done_after([] {});
}

}  // namespace zero
