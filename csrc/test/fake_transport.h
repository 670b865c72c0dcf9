// N ranks as threads of one process. The last rank to start a collective
// carries it out, with plain loops where the dtype is float, so that sanitizers
// see each access. A rank can be killed: what it did not start never completes.
#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "zero/transport.h"

namespace zero::test {

class Hub {
 public:
  explicit Hub(int world) : world_(world) {}

  int world() const {
    return world_;
  }

  // Every collective that `rank` has not started fails for its peers.
  void kill(int rank) {
    const std::lock_guard lock(mutex_);
    dead_ = rank;
    changed_.notify_all();
  }

  Status start(
      int rank,
      int number,
      const std::string& kind,
      const at::Tensor& in,
      const at::Tensor& out) {
    const std::lock_guard lock(mutex_);
    Collective& op = collectives_[number];
    if (op.arrived == 0) {
      op.kind = kind;
      op.in.resize(static_cast<size_t>(world_));
      op.out.resize(static_cast<size_t>(world_));
    }
    if (op.kind != kind) {
      return Status::error("ranks disagree: " + op.kind + " and " + kind);
    }
    op.in[static_cast<size_t>(rank)] = in;
    op.out[static_cast<size_t>(rank)] = out;
    op.arrived += 1;
    if (op.arrived == world_) {
      op.status = run(op);
      op.done = true;
      op.in.clear();
      op.out.clear();
      changed_.notify_all();
    }
    return {};
  }

  Status wait(int number) {
    std::unique_lock lock(mutex_);
    Collective& op = collectives_[number];
    changed_.wait(lock, [&] { return op.done || dead_ >= 0; });
    if (!op.done) {
      return Status::error(
          "connection closed by peer " + std::to_string(dead_));
    }
    return op.status;
  }

 private:
  struct Collective {
    std::string kind;
    int arrived = 0;
    bool done = false;
    Status status;
    std::vector<at::Tensor> in;
    std::vector<at::Tensor> out;
  };

  Status run(Collective& op) const {
    for (const auto* tensors : {&op.in, &op.out}) {
      for (const at::Tensor& tensor : *tensors) {
        if (tensor.dim() != 1 || !tensor.is_contiguous() ||
            tensor.numel() != tensors->front().numel() ||
            tensor.scalar_type() != op.in.front().scalar_type()) {
          return Status::error("ranks disagree about the tensors of " + op.kind);
        }
      }
    }
    const auto ranks = static_cast<size_t>(world_);
    const auto itemsize = static_cast<size_t>(op.in[0].element_size());
    const auto count = static_cast<size_t>(op.out[0].numel());
    if (op.kind == "all_gather") {
      const size_t bytes = op.in[0].nbytes();
      if (count * itemsize != ranks * bytes) {
        return Status::error("the output of all_gather has the wrong size");
      }
      for (size_t to = 0; to < ranks; ++to) {
        auto* data = static_cast<char*>(op.out[to].mutable_data_ptr());
        for (size_t from = 0; from < ranks; ++from) {
          std::memcpy(data + from * bytes, op.in[from].const_data_ptr(), bytes);
        }
      }
      return {};
    }
    if (op.kind == "all_to_all") {
      const size_t bytes = op.in[0].nbytes() / ranks;
      for (size_t to = 0; to < ranks; ++to) {
        auto* data = static_cast<char*>(op.out[to].mutable_data_ptr());
        for (size_t from = 0; from < ranks; ++from) {
          const auto* sent = static_cast<const char*>(op.in[from].const_data_ptr());
          std::memcpy(data + from * bytes, sent + to * bytes, bytes);
        }
      }
      return {};
    }
    if (op.in[0].scalar_type() != at::kFloat) {
      return Status::error("the fake adds up floats only");
    }
    const bool scatters = op.kind == "reduce_scatter";
    if (scatters && op.in[0].numel() != op.out[0].numel() * world_) {
      return Status::error("the output of reduce_scatter has the wrong size");
    }
    std::vector<std::vector<float>> sums(ranks, std::vector<float>(count));
    for (size_t to = 0; to < ranks; ++to) {
      for (size_t from = 0; from < ranks; ++from) {
        const float* data = op.in[from].const_data_ptr<float>() +
            (scatters ? to * count : 0);
        for (size_t i = 0; i < count; ++i) {
          sums[to][i] = from == 0 ? data[i] : sums[to][i] + data[i];
        }
      }
    }
    for (size_t to = 0; to < ranks; ++to) {
      std::memcpy(
          op.out[to].mutable_data_ptr(), sums[to].data(), count * itemsize);
    }
    return {};
  }

  const int world_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int dead_ = -1;
  std::map<int, Collective> collectives_;
};

class FakeTransport final : public Transport {
 public:
  FakeTransport(std::shared_ptr<Hub> hub, int rank)
      : hub_(std::move(hub)), rank_(rank) {}

  std::string name() const override {
    return "fake";
  }
  StartResult start_all_gather(const at::Tensor& in, const at::Tensor& out)
      override {
    return start("all_gather", in, out);
  }
  StartResult start_reduce_scatter(const at::Tensor& in, const at::Tensor& out)
      override {
    return start("reduce_scatter", in, out);
  }
  StartResult start_all_reduce(const at::Tensor& inout) override {
    return start("all_reduce", inout, inout);
  }
  StartResult start_all_to_all(const at::Tensor& in, const at::Tensor& out)
      override {
    return start("all_to_all", in, out);
  }

 private:
  class FakeHandle final : public Handle {
   public:
    FakeHandle(std::shared_ptr<Hub> hub, int number)
        : hub_(std::move(hub)), number_(number) {}
    Status wait() override {
      return hub_->wait(number_);
    }

   private:
    std::shared_ptr<Hub> hub_;
    int number_;
  };

  StartResult start(
      const char* kind,
      const at::Tensor& in,
      const at::Tensor& out) {
    const int number = next_++;
    ZERO_RETURN_IF_ERROR(hub_->start(rank_, number, kind, in, out));
    return StartResult(std::make_unique<FakeHandle>(hub_, number));
  }

  std::shared_ptr<Hub> hub_;
  int rank_;
  int next_ = 0;
};

}  // namespace zero::test
