#include "zero/c10d_transport.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "zero/recycler.h"

namespace zero {
namespace {

using GroupRef = c10::intrusive_ptr<::c10d::ProcessGroup>;
using Work = c10::intrusive_ptr<::c10d::Work>;

// torch 2.13 renamed the flat collectives and deprecated the old names, so the
// name is chosen by what the class has and not by a version number.
template <typename Group>
Work all_gather_flat(Group& group, at::Tensor& out, at::Tensor& in) {
  if constexpr (requires { group.all_gather_single(out, in); }) {
    return group.all_gather_single(out, in);
  } else {
    return group._allgather_base(out, in);
  }
}

template <typename Group>
Work reduce_scatter_flat(Group& group, at::Tensor& out, at::Tensor& in) {
  if constexpr (requires { group.reduce_scatter_single(out, in); }) {
    return group.reduce_scatter_single(out, in);
  } else {
    return group._reduce_scatter_base(out, in);
  }
}

// As in zero_compiler/ranks/group.py.
constexpr const char* kDestroyed =
    "the process group over which the model was sharded has been destroyed; "
    "call torch.distributed.destroy_process_group after the last use of the "
    "model, or make the model again over a new group";

std::string reason_of(const std::exception& error) {
  if (const auto* torch_error = dynamic_cast<const c10::Error*>(&error)) {
    return torch_error->what_without_backtrace();
  }
  return error.what();
}

std::string backend_of(const ::c10d::ProcessGroup& group) {
  try {
    return group.getBackendName();
  } catch (const std::exception&) {
    return "c10d";  // different ones, and none of them is the default
  }
}

// What threads wait for, and why they are to wait no longer. A wait for a peer
// looks nowhere else, so another thread must end it.
class Waits {
 public:
  void stop(const std::string& reason) {
    const std::lock_guard lock(mutex_);
    if (!stopped_) {
      stopped_ = reason;
    }
    for (::c10d::Work* message : messages_) {
      message->abort();
    }
  }

  // For a send or a receive of gloo, which abort() ends.
  Status wait_message(::c10d::Work& work) {
    {
      const std::lock_guard lock(mutex_);
      if (stopped_) {
        return Status::error(*stopped_);
      }
      messages_.push_back(&work);
    }
    const Status done = finish([&] { return work.wait(); });
    const std::lock_guard lock(mutex_);
    std::erase(messages_, &work);
    return !done.ok() && stopped_ ? Status::error(*stopped_) : done;
  }

  // For a collective of gloo on CPU tensors. It cannot be ended; its thread goes
  // on until the group gives it up.
  Status wait_collective(::c10d::Work& work) {
    constexpr auto kSlice = std::chrono::milliseconds(250);
    for (;;) {
      const Status done = finish([&] { return work.wait(kSlice); });
      if (done.ok()) {
        return done;
      }
      if (work.isCompleted()) {
        // It may have ended well between the end of the slice and this look:
        // then the error is that of the slice.
        return finish([&] { return work.wait(); });
      }
      const std::lock_guard lock(mutex_);
      if (stopped_) {
        return Status::error(*stopped_);
      }
    }
  }

  template <typename Wait>
  static Status finish(Wait&& wait) {
    try {
      if (!std::forward<Wait>(wait)()) {
        return Status::error("the transfer was aborted");
      }
    } catch (const std::exception& error) {
      return Status::error(reason_of(error));
    }
    return {};
  }

 private:
  std::mutex mutex_;  // guards what follows
  std::optional<std::string> stopped_;
  std::vector<::c10d::Work*> messages_;  // that some thread waits for
};

// `waits`: null where a wait does not block the host.
class WorkHandle final : public Handle {
 public:
  WorkHandle(
      Work work,
      at::Tensor in,
      at::Tensor out,
      std::shared_ptr<Waits> waits)
      : work_(std::move(work)),
        in_(std::move(in)),
        out_(std::move(out)),
        waits_(std::move(waits)) {}

  Status wait() override {
    ZERO_RETURN_IF_ERROR(
        waits_ ? waits_->wait_collective(*work_)
               : Waits::finish([&] { return work_->wait(); }));
    in_.reset();
    out_.reset();
    return {};
  }

 private:
  Work work_;
  // Backends differ in whether they hold their tensors, so hold them here.
  at::Tensor in_;
  at::Tensor out_;
  const std::shared_ptr<Waits> waits_;
};

// A gather moves bytes and adds nothing up, so any dtype can travel as bytes;
// backends know only some (gloo and NCCL lack the 8-bit floats and bool).
at::Tensor as_wire(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kInt:
    case at::kLong:
    case at::kByte:
    case at::kChar:
      return tensor;
    default:
      return tensor.view(at::kByte);
  }
}

template <typename Start>
StartResult start_with(
    at::Tensor in,
    at::Tensor out,
    std::shared_ptr<Waits> waits,
    Start&& start) {
  Work work = std::forward<Start>(start)(out, in);
  return StartResult(std::make_unique<WorkHandle>(
      std::move(work), std::move(in), std::move(out), std::move(waits)));
}

// All the sends and receives of one direct exchange, and the sum after it.
class ExchangeHandle final : public Handle {
 public:
  ExchangeHandle(at::Tensor in, at::Tensor out, std::shared_ptr<Waits> waits)
      : in_(std::move(in)), out_(std::move(out)), waits_(std::move(waits)) {}

  void add_work(Work work) {
    works_.push_back(std::move(work));
  }
  // wait() adds these to out, in this order.
  void add_summand(at::Tensor summand) {
    summands_.push_back(std::move(summand));
  }

  Status wait() override {
    for (const Work& work : works_) {
      ZERO_RETURN_IF_ERROR(waits_->wait_message(*work));
    }
    try {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      for (const at::Tensor& summand : summands_) {
        out_.add_(summand);
      }
    } catch (const std::exception& error) {
      return Status::error(reason_of(error));
    }
    works_.clear();
    summands_.clear();
    in_.reset();
    out_.reset();
    return {};
  }

 private:
  at::Tensor in_;
  at::Tensor out_;
  const std::shared_ptr<Waits> waits_;
  std::vector<at::Tensor> summands_;
  std::vector<Work> works_;  // destroyed first: they write to the tensors
};

// On CPU tensors gloo's own flat collectives are slow and allocate (measured on
// torch 2.13 with 32 MB over loopback): all-gather makes a copy of its output,
// 0.9 GB/s; reduce-scatter copies its input once or twice, 0.8 GB/s. Sending
// each chunk straight from where it lies to where it goes needs no copy and runs
// at 2.8 and 2.3 GB/s; gloo's event loop moves the bytes, so it overlaps with
// compute as the collectives do.
class C10dTransport final : public Transport {
 public:
  C10dTransport(const GroupRef& group, uint32_t series)
      : group_(group),
        series_(series),
        name_(backend_of(*group)),
        rank_(group->getRank()),
        world_(group->getSize()) {}

  std::string name() const override {
    return name_;
  }

  int64_t scratch_bytes() const override {
    int64_t total = 0;
    for (const at::Tensor& block : scratch_) {
      total += static_cast<int64_t>(block.nbytes());
    }
    return total;
  }

  StartResult start_all_gather(const at::Tensor& in, const at::Tensor& out)
      override {
    return with_group([&](::c10d::ProcessGroup& group) {
      if (exchanges_directly(group, in)) {
        at::AutoDispatchBelowADInplaceOrView below_autograd;
        return exchange_all_gather(group, as_wire(in), as_wire(out));
      }
      return start_with(
          as_wire(in), as_wire(out), waits_for(group, in),
          [&](at::Tensor& to, at::Tensor& from) {
            return all_gather_flat(group, to, from);
          });
    });
  }

  StartResult start_reduce_scatter(const at::Tensor& in, const at::Tensor& out)
      override {
    return with_group([&](::c10d::ProcessGroup& group) {
      if (exchanges_directly(group, in)) {
        at::AutoDispatchBelowADInplaceOrView below_autograd;
        return exchange_reduce_scatter(group, in, out);
      }
      return start_with(
          in, out, waits_for(group, in), [&](at::Tensor& to, at::Tensor& from) {
            return reduce_scatter_flat(group, to, from);
          });
    });
  }

  StartResult start_all_reduce(const at::Tensor& inout) override {
    return with_group([&](::c10d::ProcessGroup& group) {
      return start_with(
          inout, inout, waits_for(group, inout), [&](at::Tensor& to, at::Tensor&) {
            std::vector<at::Tensor> tensors{to};
            return group.allreduce(tensors);
          });
    });
  }

  StartResult start_all_to_all(const at::Tensor& in, const at::Tensor& out)
      override {
    return with_group([&](::c10d::ProcessGroup& group) -> StartResult {
      if (!exchanges_directly(group, in)) {
        return Transport::start_all_to_all(in, out);
      }
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      return exchange_all_to_all(group, in, out);
    });
  }

  void stop_waiting(const std::string& reason) override {
    waits_->stop(reason);
  }

 private:
  // Where another thread destroys the group meanwhile, it ends here, which joins
  // threads that may want the GIL. Nobody who starts a transfer holds that.
  template <typename Body>
  StartResult with_group(Body&& body) {
    const GroupRef group = group_.lock();
    if (!group) {
      return Status::error(kDestroyed);
    }
    try {
      return std::forward<Body>(body)(*group);
    } catch (const std::exception& error) {
      return Status::error(reason_of(error));
    }
  }

  bool exchanges_directly(::c10d::ProcessGroup& group, const at::Tensor& tensor) {
    if (!tensor.is_cpu()) {
      return false;
    }
    if (!cpu_is_gloo_) {
      cpu_is_gloo_ =
          group.getBackend(c10::DeviceType::CPU)->getBackendName() == "gloo";
    }
    return *cpu_is_gloo_;
  }

  std::shared_ptr<Waits> waits_for(
      ::c10d::ProcessGroup& group,
      const at::Tensor& tensor) {
    return exchanges_directly(group, tensor) ? waits_ : nullptr;
  }

  // Ranks start the transfers of one series in the same order, so they agree on
  // the number. No two series have a tag in common: a transfer that broke off
  // leaves a message that nobody takes, and gloo would give that to the next one
  // with its tag. Far from the small tags that people choose for their own
  // messages.
  int next_tag() {
    constexpr uint32_t kFirst = 1U << 30;
    constexpr uint32_t kCount = 1U << 15;  // and as many series
    sequence_ = (sequence_ + 1) % kCount;
    return static_cast<int>(kFirst + series_ % kCount * kCount + sequence_);
  }

  static Work send(
      ::c10d::ProcessGroup& group,
      at::Tensor tensor,
      int to,
      int tag) {
    std::vector<at::Tensor> tensors{std::move(tensor)};
    return group.send(tensors, to, tag);
  }

  static Work receive(
      ::c10d::ProcessGroup& group,
      at::Tensor tensor,
      int from,
      int tag) {
    std::vector<at::Tensor> tensors{std::move(tensor)};
    return group.recv(tensors, from, tag);
  }

  // A block that no exchange in flight uses, at least this long. One that is too
  // short is replaced, so that what is kept is the largest need of a step.
  at::Tensor take_scratch(int64_t nbytes) {
    at::Tensor* free_block = nullptr;
    for (at::Tensor& block : scratch_) {
      if (!held_by_nobody_else(block.storage())) {
        continue;
      }
      free_block = &block;
      if (static_cast<int64_t>(block.nbytes()) >= nbytes) {
        break;
      }
    }
    if (free_block == nullptr) {
      free_block = &scratch_.emplace_back();
    }
    if (!free_block->defined() ||
        static_cast<int64_t>(free_block->nbytes()) < nbytes) {
      free_block->reset();  // before the new one, not beside it
      *free_block = at::empty({nbytes}, at::TensorOptions(at::kByte));
    }
    return free_block->narrow(0, 0, nbytes);
  }

  StartResult exchange_all_gather(
      ::c10d::ProcessGroup& group,
      const at::Tensor& in,
      const at::Tensor& out) {
    auto handle = std::make_unique<ExchangeHandle>(in, out, waits_);
    const int tag = next_tag();
    const int64_t chunk = in.numel();
    // Rank r begins with its neighbour: not all with rank 0 at once.
    for (int step = 1; step < world_; ++step) {
      const int from = (rank_ - step + world_) % world_;
      handle->add_work(
          receive(group, out.narrow(0, from * chunk, chunk), from, tag));
    }
    for (int step = 1; step < world_; ++step) {
      handle->add_work(send(group, in, (rank_ + step) % world_, tag));
    }
    at::Tensor mine = out.narrow(0, rank_ * chunk, chunk);
    if (mine.const_data_ptr() != in.const_data_ptr()) {
      mine.copy_(in);
    }
    return StartResult(std::move(handle));
  }

  StartResult exchange_all_to_all(
      ::c10d::ProcessGroup& group,
      const at::Tensor& in,
      const at::Tensor& out) {
    auto handle = std::make_unique<ExchangeHandle>(in, out, waits_);
    const int tag = next_tag();
    const int64_t part = in.numel() / world_;
    for (int step = 1; step < world_; ++step) {
      const int from = (rank_ - step + world_) % world_;
      handle->add_work(
          receive(group, out.narrow(0, from * part, part), from, tag));
    }
    for (int step = 1; step < world_; ++step) {
      const int to = (rank_ + step) % world_;
      handle->add_work(send(group, in.narrow(0, to * part, part), to, tag));
    }
    out.narrow(0, rank_ * part, part).copy_(in.narrow(0, rank_ * part, part));
    return StartResult(std::move(handle));
  }

  // Sums in the order of the ranks, whatever the order of arrival: equal inputs
  // give equal bits. The lowest other rank's chunk is received into `out`
  // itself, so two ranks need no scratch; more need world - 2 chunks.
  StartResult exchange_reduce_scatter(
      ::c10d::ProcessGroup& group,
      const at::Tensor& in,
      const at::Tensor& out) {
    auto handle = std::make_unique<ExchangeHandle>(in, out, waits_);
    const int tag = next_tag();
    const int64_t chunk = out.numel();
    at::Tensor scratch;
    if (world_ > 2) {
      scratch = take_scratch((world_ - 2) * static_cast<int64_t>(out.nbytes()))
                    .view(out.scalar_type());
    }
    std::vector<at::Tensor> landing(static_cast<size_t>(world_));
    int64_t used = 0;
    const int lowest = rank_ == 0 ? 1 : 0;
    for (int from = 0; from < world_; ++from) {
      if (from == rank_) {
        landing[static_cast<size_t>(from)] = in.narrow(0, rank_ * chunk, chunk);
      } else if (from == lowest) {
        landing[static_cast<size_t>(from)] = out;
      } else {
        landing[static_cast<size_t>(from)] = scratch.narrow(0, used, chunk);
        used += chunk;
      }
      if (from != lowest) {
        handle->add_summand(landing[static_cast<size_t>(from)]);
      }
    }
    for (int step = 1; step < world_; ++step) {
      const int from = (rank_ - step + world_) % world_;
      handle->add_work(
          receive(group, landing[static_cast<size_t>(from)], from, tag));
    }
    for (int step = 1; step < world_; ++step) {
      const int to = (rank_ + step) % world_;
      handle->add_work(send(group, in.narrow(0, to * chunk, chunk), to, tag));
    }
    return StartResult(std::move(handle));
  }

  // Its owner destroys it. What is in flight keeps what it needs of it.
  const c10::weak_intrusive_ptr<::c10d::ProcessGroup> group_;
  const uint32_t series_;
  const std::string name_;
  const int rank_;
  const int world_;
  const std::shared_ptr<Waits> waits_ = std::make_shared<Waits>();
  std::optional<bool> cpu_is_gloo_;
  uint32_t sequence_ = 0;
  std::vector<at::Tensor> scratch_;  // uint8 blocks, reused
};

}  // namespace

std::unique_ptr<Transport> make_c10d_transport(
    const c10::intrusive_ptr<::c10d::ProcessGroup>& group,
    uint32_t series) {
  return std::make_unique<C10dTransport>(group, series);
}

}  // namespace zero
