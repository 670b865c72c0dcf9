#include "zero/hosts_transport.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <pthread.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "zero/quantise.h"
#include "zero/range.h"
#include "zero/sum.h"

namespace zero {
namespace {

constexpr auto kSlice = std::chrono::milliseconds(50);
constexpr auto kLane = "device-device";  // as plans call it: the name of the thread

// One collective: what is to be done, and how it ended.
struct Job {
  Job(std::function<Status()> what, std::unique_ptr<const Carried> profiler)
      : run(std::move(what)), carried(std::move(profiler)) {}

  std::function<Status()> run;  // holds its tensors
  std::unique_ptr<const Carried> carried;  // null where no profiler runs
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  Status status;
};

class JobHandle final : public Handle {
 public:
  JobHandle(std::shared_ptr<Job> job, std::function<bool()> interrupted)
      : job_(std::move(job)), interrupted_(std::move(interrupted)) {}

  Status wait() override {
    std::unique_lock lock(job_->mutex);
    while (!job_->changed.wait_for(lock, kSlice, [&] { return job_->done; })) {
      if (interrupted_) {
        lock.unlock();
        const bool stop = interrupted_();
        lock.lock();
        if (stop && !job_->done) {
          return Status::error("interrupted");
        }
      }
    }
    return job_->status;
  }

 private:
  const std::shared_ptr<Job> job_;
  const std::function<bool()> interrupted_;
};

// What the thread works with. It belongs to the transport and to the thread, which
// may sit in a collective whose peers are gone when the transport is dropped.
class Worker {
 public:
  Worker(
      std::unique_ptr<Transport> across,
      std::unique_ptr<Transport> inside,
      const HostsOptions& options)
      : across_(std::move(across)),
        inside_(std::move(inside)),
        peers_(*inside_->peers()),
        place_(options.rank % options.local_world),
        places_(options.local_world),
        host_(options.rank / options.local_world),
        hosts_(options.world / options.local_world) {}

  void post(std::shared_ptr<Job> job) {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
    changed_.notify_one();
  }

  // True if the thread will end at once.
  bool stop() {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    changed_.notify_one();
    return !busy_ && jobs_.empty();
  }

  void loop() {
    (void)::pthread_setname_np(::pthread_self(), kLane);
    Status failed;
    for (;;) {
      std::shared_ptr<Job> job;
      {
        std::unique_lock lock(mutex_);
        busy_ = false;
        changed_.wait(lock, [&] { return stopped_ || !jobs_.empty(); });
        if (jobs_.empty()) {
          return;
        }
        job = std::move(jobs_.front());
        jobs_.pop_front();
        busy_ = true;
      }
      if (failed.ok()) {
        failed = carry_out(*job);
        if (!failed.ok()) {
          peers_.give_up(failed.message());
        }
      }
      auto run = std::move(job->run);
      run = nullptr;  // tensors go before the one who waits goes on
      job->carried.reset();
      const std::lock_guard lock(job->mutex);
      job->status = failed;
      job->done = true;
      job->changed.notify_all();
    }
  }

  void give_up(const std::string& reason) {
    peers_.give_up(reason);
  }

  void stop_waiting(const std::string& reason) {
    across_->stop_waiting(reason);
  }

  void close() {
    peers_.close();
  }

  int64_t scratch_bytes() const {
    return scratch_bytes_.load(std::memory_order_relaxed);
  }

  Status all_gather(const at::Tensor& in, const at::Tensor& out) {
    const auto chunk = static_cast<int64_t>(in.nbytes());
    ZERO_RETURN_IF_ERROR(own(hosts_ * chunk));
    const at::Tensor landing =
        own_.narrow(0, 0, hosts_ * chunk).view(in.scalar_type());
    ZERO_RETURN_IF_ERROR(wait(across_->start_all_gather(in, landing)));
    const int64_t number = publish();
    ZERO_RETURN_IF_ERROR(peers_.wait_published(number, "a gather"));
    auto* to = static_cast<char*>(out.mutable_data_ptr());
    for (int place = 0; place < places_; ++place) {
      auto from = peers_.published(place, number, hosts_ * chunk);
      ZERO_RETURN_IF_ERROR(from.status());
      for (int host = 0; host < hosts_; ++host) {
        std::memcpy(
            to + (int64_t{host} * places_ + place) * chunk,
            static_cast<const char*>(from.value()) + host * chunk,
            static_cast<size_t>(chunk));
      }
    }
    peers_.release(number);
    return {};
  }

  Status reduce_scatter(const at::Tensor& in, const at::Tensor& out) {
    const at::Tensor sums = sums_like(out, hosts_);
    ZERO_RETURN_IF_ERROR(sum_for_hosts(in, out, sums));
    return wait(across_->start_reduce_scatter(sums, out));
  }

  // What this host's ranks add up stays as it is; of the others' sums the blocks
  // arrive, and are added to it in float32, host after host.
  Status packed_reduce_scatter(
      const at::Tensor& in,
      const at::Tensor& out,
      c10::ScalarType wire,
      const std::vector<Rows>& parts) {
    const at::Tensor sums = sums_like(out, hosts_);
    ZERO_RETURN_IF_ERROR(sum_for_hosts(in, out, sums));
    const int64_t numel = out.numel();
    int64_t packed = 0;
    for (const Rows& part : parts) {
      packed += packed_bytes(part.numel, part.row);
    }
    const int64_t floats = numel * static_cast<int64_t>(sizeof(float));
    const at::Tensor room = packing_room(2 * hosts_ * packed + 2 * floats);
    const at::Tensor sent = room.narrow(0, 0, hosts_ * packed);
    const at::Tensor arrived = room.narrow(0, hosts_ * packed, hosts_ * packed);
    const at::Tensor wide =
        room.narrow(0, 2 * hosts_ * packed, floats).view(at::kFloat);
    const at::Tensor term =
        room.narrow(0, 2 * hosts_ * packed + floats, floats).view(at::kFloat);
    for (int host = 0; host < hosts_; ++host) {
      if (host != host_) {
        ZERO_RETURN_IF_ERROR(each_part(
            parts, sums.narrow(0, host * numel, numel),
            sent.narrow(0, host * packed, packed),
            [&](const Rows& part, const at::Tensor& rows, const at::Tensor& to) {
              return pack_rows(rows, part.row, wire, to);
            }));
      }
    }
    ZERO_RETURN_IF_ERROR(wait(across_->start_all_to_all(sent, arrived)));
    wide.copy_(sums.narrow(0, host_ * numel, numel));
    for (int host = 0; host < hosts_; ++host) {
      if (host != host_) {
        ZERO_RETURN_IF_ERROR(each_part(
            parts, term, arrived.narrow(0, host * packed, packed),
            [&](const Rows& part, const at::Tensor& rows, const at::Tensor& of) {
              return unpack_rows(of, part.row, wire, rows);
            }));
        wide.add_(term);
      }
    }
    out.copy_(wide);
    return {};
  }

  Status all_reduce(const at::Tensor& inout) {
    const at::Tensor sum = sums_like(inout, 1);
    ZERO_RETURN_IF_ERROR(sum_inside(inout, [&](const Parts& parts) {
      return sum_parts(parts, inout.scalar_type(), 1.0, sum);
    }));
    ZERO_RETURN_IF_ERROR(wait(across_->start_all_reduce(sum)));
    inout.copy_(sum);
    return {};
  }

 private:
  using Parts = std::vector<const void*>;

  static Status carry_out(Job& job) {
    try {
      std::optional<CarriedRange> range;
      if (job.carried != nullptr) {
        range.emplace(*job.carried);
      }
      return job.run();
    } catch (const std::exception& error) {
      return Status::error(error.what());
    }
  }

  static Status wait(StartResult started) {
    ZERO_RETURN_IF_ERROR(started.status());
    return started.value()->wait();
  }

  // For each host, the sum over this host's ranks of what is due to this rank's
  // place there; `out` is what one of them gives.
  Status sum_for_hosts(
      const at::Tensor& in,
      const at::Tensor& out,
      const at::Tensor& sums) {
    const auto chunk = static_cast<int64_t>(out.nbytes());
    return sum_inside(in, [&](const Parts& parts) -> Status {
      for (int host = 0; host < hosts_; ++host) {
        const int64_t at = (int64_t{host} * places_ + place_) * chunk;
        Parts here;
        for (const void* part : parts) {
          here.push_back(static_cast<const char*>(part) + at);
        }
        ZERO_RETURN_IF_ERROR(sum_parts(
            here, out.scalar_type(), 1.0,
            sums.narrow(0, host * out.numel(), out.numel())));
      }
      return {};
    });
  }

  // `body` for each part, with its numbers and its packed bytes.
  template <typename Body>
  static Status each_part(
      const std::vector<Rows>& parts,
      const at::Tensor& numbers,
      const at::Tensor& packed,
      Body&& body) {
    int64_t at = 0;
    int64_t byte = 0;
    for (const Rows& part : parts) {
      const int64_t nbytes = packed_bytes(part.numel, part.row);
      ZERO_RETURN_IF_ERROR(
          body(part, numbers.narrow(0, at, part.numel),
               packed.narrow(0, byte, nbytes)));
      at += part.numel;
      byte += nbytes;
    }
    return {};
  }

  // Lays `in` where this host's ranks read it, and has `sum` add what all of them
  // laid there.
  template <typename Sum>
  Status sum_inside(const at::Tensor& in, Sum&& sum) {
    const auto nbytes = static_cast<int64_t>(in.nbytes());
    ZERO_RETURN_IF_ERROR(own(nbytes));
    std::memcpy(
        own_.mutable_data_ptr(), in.const_data_ptr(),
        static_cast<size_t>(nbytes));
    const int64_t number = publish();
    ZERO_RETURN_IF_ERROR(peers_.wait_published(number, "a reduction"));
    Parts parts;
    for (int place = 0; place < places_; ++place) {
      auto part = peers_.published(place, number, nbytes);
      ZERO_RETURN_IF_ERROR(part.status());
      parts.push_back(part.value());
    }
    ZERO_RETURN_IF_ERROR(sum(parts));
    peers_.release(number);
    return {};
  }

  // Room in own_ that no peer reads any more.
  Status own(int64_t nbytes) {
    if (last_ >= 0) {
      ZERO_RETURN_IF_ERROR(peers_.wait_released(last_, "the next transfer"));
    }
    if (own_.defined() && own_.numel() >= nbytes) {
      return {};
    }
    auto block =
        peers_.block(PeerMemory::Space::kOwn, std::max<int64_t>(nbytes, 1));
    ZERO_RETURN_IF_ERROR(block.status());
    own_ = std::move(block.value());
    count_scratch();
    return {};
  }

  int64_t publish() {
    last_ = peers_.begin();
    peers_.publish(last_, 0);
    return last_;
  }

  at::Tensor sums_like(const at::Tensor& tensor, int64_t times) {
    const auto nbytes = static_cast<int64_t>(tensor.nbytes()) * times;
    if (!sums_.defined() || sums_.numel() < nbytes) {
      sums_ = at::Tensor();
      sums_ = at::empty({nbytes}, at::TensorOptions(at::kByte));
      count_scratch();
    }
    return sums_.narrow(0, 0, nbytes).view(tensor.scalar_type());
  }

  at::Tensor packing_room(int64_t nbytes) {
    if (!packing_.defined() || packing_.numel() < nbytes) {
      packing_ = at::Tensor();
      packing_ = at::empty({nbytes}, at::TensorOptions(at::kByte));
      count_scratch();
    }
    return packing_.narrow(0, 0, nbytes);
  }

  void count_scratch() {
    int64_t total = across_->scratch_bytes();
    for (const at::Tensor* block : {&own_, &sums_, &packing_}) {
      total += block->defined() ? block->numel() : 0;
    }
    scratch_bytes_.store(total, std::memory_order_relaxed);
  }

  const std::unique_ptr<Transport> across_;
  const std::unique_ptr<Transport> inside_;
  PeerMemory& peers_;
  const int place_;
  const int places_;
  const int host_;
  const int hosts_;

  // The thread's alone.
  int64_t last_ = -1;  // number of the last transfer inside
  at::Tensor own_;  // uint8, what this host's ranks read
  at::Tensor sums_;  // uint8
  at::Tensor packing_;  // uint8: blocks and float32 sums
  std::atomic<int64_t> scratch_bytes_ = 0;

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Job>> jobs_;
  bool stopped_ = false;
  bool busy_ = true;  // until the thread looks for work
};

class HostsTransport final : public Transport {
 public:
  HostsTransport(std::shared_ptr<Worker> worker, HostsOptions options)
      : options_(std::move(options)),
        process_(::getpid()),
        worker_(std::move(worker)),
        thread_([worker = worker_] { worker->loop(); }) {}

  ~HostsTransport() override {
    if (::getpid() != process_) {
      thread_.detach();  // a forked copy of the rank has no such thread
      return;
    }
    // A collective whose peers are gone ends with its timeout, which nobody is
    // to wait for.
    const bool ends = worker_->stop();
    worker_->close();
    if (ends) {
      thread_.join();
    } else {
      thread_.detach();
    }
  }

  std::string name() const override {
    return "shared memory inside a host, c10d between hosts";
  }

  StartResult start_all_gather(const at::Tensor& in, const at::Tensor& out)
      override {
    return start(
        [worker = worker_.get(), in, out] { return worker->all_gather(in, out); });
  }

  StartResult start_reduce_scatter(const at::Tensor& in, const at::Tensor& out)
      override {
    return start([worker = worker_.get(), in, out] {
      return worker->reduce_scatter(in, out);
    });
  }

  StartResult start_packed_reduce_scatter(
      const at::Tensor& in,
      const at::Tensor& out,
      c10::ScalarType wire,
      std::vector<Rows> parts) override {
    return start(
        [worker = worker_.get(), in, out, wire, rows = std::move(parts)] {
          return worker->packed_reduce_scatter(in, out, wire, rows);
        });
  }

  StartResult start_all_reduce(const at::Tensor& inout) override {
    return start(
        [worker = worker_.get(), inout] { return worker->all_reduce(inout); });
  }

  void about(const std::string& label) override {
    if (profiled()) {
      range_ = name_on(kLane, label);
    }
  }

  void give_up(const std::string& reason) override {
    worker_->give_up(reason);
  }

  void stop_waiting(const std::string& reason) override {
    worker_->stop_waiting(reason);
  }

  int64_t scratch_bytes() const override {
    return worker_->scratch_bytes();
  }

 private:
  StartResult start(std::function<Status()> run) {
    auto job = std::make_shared<Job>(std::move(run), Carried::make(range_));
    worker_->post(job);
    return StartResult(
        std::make_unique<JobHandle>(std::move(job), options_.interrupted));
  }

  const HostsOptions options_;
  const pid_t process_;
  const std::shared_ptr<Worker> worker_;
  std::string range_;  // name of what is started next, while a profiler runs
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Transport> make_hosts_transport(
    std::unique_ptr<Transport> across,
    std::unique_ptr<Transport> inside,
    HostsOptions options) {
  auto worker =
      std::make_shared<Worker>(std::move(across), std::move(inside), options);
  return std::make_unique<HostsTransport>(
      std::move(worker), std::move(options));
}

}  // namespace zero
