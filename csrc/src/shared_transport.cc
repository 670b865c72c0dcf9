#include "zero/shared_transport.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "zero/alloc_meter.h"

namespace zero {
namespace {

using std::chrono::steady_clock;

constexpr int kControlSpace = 0;
constexpr int kSlotsSpace = 2;
constexpr int kKeptSpace = 3;
constexpr int kFirstOwnSpace = 4;

constexpr const char* kDescriptors =
    "; each model, and each part that is sharded by itself, takes a few "
    "descriptors: raise the limit (ulimit -n), or shard fewer parts by "
    "themselves";

constexpr int64_t kPage = 4096;
constexpr int64_t kWindow = 16 * 1024;
constexpr auto kSlice = std::chrono::milliseconds(50);
constexpr int kSpins = 2000;

// Control words: written by their rank alone, but for `sleepers`. All begin as
// zero, as fresh memory does.
struct Transfer {
  std::atomic<int64_t> published;  // number of the last one, plus one
  std::atomic<int64_t> released;  // the same
  std::atomic<int64_t> offset;  // valid while published
};

enum Fate : uint32_t { kAlive = 0, kGaveUp = 1, kClosed = 2 };

struct RankWords {
  alignas(64) std::atomic<uint32_t> bell;  // changes with each of the others
  std::atomic<uint32_t> sleepers;  // peers that sleep on the bell
  alignas(64) std::atomic<int64_t> left;  // calls
  std::atomic<int64_t> own_bytes;  // size of kOwn
  std::atomic<uint32_t> fate;
  char reason[1024];  // valid once fate is kGaveUp
  alignas(64) Transfer transfers[kWindow];
};
static_assert(std::atomic<int64_t>::is_always_lock_free);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

void futex_wait(
    const std::atomic<uint32_t>& word,
    uint32_t value,
    std::chrono::milliseconds timeout) {
  timespec time{};
  time.tv_sec = timeout.count() / 1000;
  time.tv_nsec = timeout.count() % 1000 * 1'000'000;
  // Whatever it returns, the caller looks again.
  (void)::syscall(SYS_futex, &word, FUTEX_WAIT, value, &time, nullptr, 0);
}

void futex_wake(const std::atomic<uint32_t>& word) {
  (void)::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Bytes that the allocator meter counts while this lives.
class Counted {
 public:
  explicit Counted(int64_t nbytes)
      : nbytes_(static_cast<size_t>(nbytes)),
        counted_(meter::allocated(nbytes_)) {}
  ~Counted() {
    if (counted_) {
      meter::freed(nbytes_);
    }
  }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;

 private:
  const size_t nbytes_;
  const bool counted_;
};

// A process, to be asked whether it still runs; one that has exited and was not
// reaped counts as dead.
class Process {
 public:
  explicit Process(pid_t pid) : pid_(pid) {}
  ~Process() {
    if (fd_ >= 0) {
      (void)::close(fd_);
    }
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  // The watch of a process, which all models of this one share: each takes a
  // descriptor.
  static Result<std::shared_ptr<Process>> of(pid_t pid) {
    static std::mutex mutex;
    static auto& known = *new std::map<pid_t, std::weak_ptr<Process>>;
    const std::lock_guard lock(mutex);
    auto found = known[pid].lock();
    // A number may have gone to another process since.
    if (found == nullptr || found->dead()) {
      found = std::make_shared<Process>(pid);
      ZERO_RETURN_IF_ERROR(found->open());
      known[pid] = found;
    }
    return found;
  }

  Status open() {
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
    fd_ = static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0));
    if (fd_ < 0) {
      const int code = errno;
      if (code == ESRCH) {
        return Status::error("its process has ended");
      }
      return Status::error(
          std::string("its process cannot be watched: ") +
          std::strerror(code) + (code == EMFILE ? kDescriptors : ""));
    }
    return {};
  }

  bool dead() const {
    pollfd question{.fd = fd_, .events = POLLIN, .revents = 0};
    return ::poll(&question, 1, 0) > 0;
  }

 private:
  const pid_t pid_;
  int fd_ = -1;
};

class SharedPeers final : public PeerMemory {
 public:
  SharedPeers(std::shared_ptr<SharedSegment> segment, SharedOptions options)
      : segment_(std::move(segment)),
        options_(std::move(options)),
        process_(::getpid()),
        rank_(options_.rank),
        world_(static_cast<int>(options_.pids.size())) {}

  ~SharedPeers() override {
    close();
  }

  Status open() {
    const auto words = static_cast<int64_t>(sizeof(RankWords)) * world_;
    auto block = segment_->block(kControlSpace, kPage + words, true);
    ZERO_RETURN_IF_ERROR(block.status());
    control_ = block.value();
    words_ = reinterpret_cast<RankWords*>(
        static_cast<char*>(control_.mutable_data_ptr()) + kPage);
    if (mine().left.load() != 0 || mine().fate.load() != kAlive) {
      return Status::error("this shared segment has been used already");
    }
    for (size_t rank = 0; rank < options_.pids.size(); ++rank) {
      auto process = Process::of(options_.pids[rank]);
      if (!process.ok()) {
        return Status::error(
            name(static_cast<int>(rank)) + ": " + process.status().message());
      }
      processes_.push_back(std::move(process.value()));
    }
    blocks_of_peers_.resize(static_cast<size_t>(world_));
    rest_ = std::make_unique<Counted>(options_.rest_bytes);
    return {};
  }

  Result<at::Tensor> block(Space space, int64_t nbytes) override {
    const bool own = space == Space::kOwn;
    auto block = segment_->block(
        own ? kFirstOwnSpace + rank_
            : space == Space::kSlots ? kSlotsSpace
                                     : kKeptSpace,
        nbytes, true);
    ZERO_RETURN_IF_ERROR(block.status());
    if (own) {
      auto& size = mine().own_bytes;
      size.store(
          std::max(size.load(std::memory_order_relaxed), nbytes),
          std::memory_order_release);
    }
    const auto counted = std::make_shared<Counted>(
        own ? nbytes : (nbytes + world_ - 1) / world_);
    void* data = block.value().mutable_data_ptr();
    return at::from_blob(
        data,
        {nbytes},
        [whole = block.value(), counted](void*) {},
        at::TensorOptions(at::kByte));
  }

  int64_t begin() override {
    return next_++;
  }

  int64_t window() const override {
    return kWindow;
  }

  void publish(int64_t number, int64_t offset) override {
    Transfer& transfer = transfer_of(rank_, number);
    transfer.offset.store(offset, std::memory_order_relaxed);
    transfer.published.store(number + 1, std::memory_order_release);
    ring();
  }

  Status wait_published(int64_t number, const std::string& label) override {
    return wait_for_all(
        [&](int peer) {
          return transfer_of(peer, number)
                     .published.load(std::memory_order_acquire) > number;
        },
        label);
  }

  Result<const void*> published(int rank, int64_t number, int64_t nbytes)
      override {
    const int64_t offset =
        transfer_of(rank, number).offset.load(std::memory_order_relaxed);
    const int64_t size =
        words_[rank].own_bytes.load(std::memory_order_acquire);
    if (offset < 0 || nbytes < 0 || offset + nbytes > size) {
      return Status::error(
          "rank " + std::to_string(rank) + " published " +
          std::to_string(size - offset) + " bytes, expected " +
          std::to_string(nbytes));
    }
    const std::lock_guard lock(mutex_);
    at::Tensor& block = blocks_of_peers_[static_cast<size_t>(rank)];
    if (!block.defined() || block.numel() < offset + nbytes) {
      auto mapped = segment_->block(kFirstOwnSpace + rank, size, false);
      ZERO_RETURN_IF_ERROR(mapped.status());
      block = mapped.value();
    }
    return static_cast<const void*>(
        static_cast<const char*>(block.const_data_ptr()) + offset);
  }

  void release(int64_t number) override {
    transfer_of(rank_, number)
        .released.store(number + 1, std::memory_order_release);
    ring();
  }

  bool released(int64_t number) override {
    for (int rank = 0; rank < world_; ++rank) {
      if (!released_by(rank, number)) {
        return false;
      }
    }
    return true;
  }

  Status wait_released(int64_t number, const std::string& label) override {
    return wait_for_all(
        [&](int peer) { return released_by(peer, number); }, label);
  }

  Status leave() override {
    const int64_t call = mine().left.load(std::memory_order_relaxed) + 1;
    mine().left.store(call, std::memory_order_release);
    ring();
    return wait_for_all(
        [&](int peer) {
          return words_[peer].left.load(std::memory_order_acquire) >= call;
        },
        "the end of a call");
  }

  void give_up(const std::string& reason) override {
    if (::getpid() != process_) {
      return;
    }
    const std::lock_guard lock(mutex_);
    if (words_ == nullptr ||
        mine().fate.load(std::memory_order_relaxed) != kAlive) {
      return;
    }
    const size_t length = std::min(reason.size(), sizeof(mine().reason) - 1);
    std::memcpy(mine().reason, reason.data(), length);
    mine().reason[length] = '\0';
    mine().fate.store(kGaveUp, std::memory_order_release);
    ring();
  }

  void close() override {
    if (::getpid() != process_) {
      return;
    }
    const std::lock_guard lock(mutex_);
    if (words_ == nullptr ||
        mine().fate.load(std::memory_order_relaxed) != kAlive) {
      return;
    }
    rest_.reset();
    mine().fate.store(kClosed, std::memory_order_release);
    ring();
  }

 private:
  RankWords& mine() {
    return words_[rank_];
  }

  Transfer& transfer_of(int rank, int64_t number) {
    return words_[rank].transfers[number % kWindow];
  }

  bool released_by(int rank, int64_t number) {
    return transfer_of(rank, number).released.load(std::memory_order_acquire) >
        number;
  }

  // After a change of this rank's words. The peer either sees the new value of
  // the bell when it goes to sleep, or is seen here as a sleeper.
  void ring() {
    mine().bell.fetch_add(1);
    if (mine().sleepers.load() > 0) {
      futex_wake(mine().bell);
    }
  }

  template <typename Done>
  Status wait_for_all(Done&& done, const std::string& label) {
    const auto start = steady_clock::now();
    for (int step = 1; step < world_; ++step) {
      const int peer = (rank_ + step) % world_;
      ZERO_RETURN_IF_ERROR(
          wait_for(peer, [&] { return done(peer); }, label, start));
    }
    return {};
  }

  template <typename Done>
  Status wait_for(
      int peer,
      Done&& done,
      const std::string& label,
      steady_clock::time_point start) {
    for (int spin = 0; spin < kSpins; ++spin) {
      if (done()) {
        return {};
      }
      relax();
    }
    RankWords& theirs = words_[peer];
    for (bool slept = false;; slept = true) {
      const uint32_t bell = theirs.bell.load();
      if (done()) {
        return {};
      }
      // What a peer did before it ended counts, so look once more after seeing
      // that it ended.
      if (Status ended = look_for_end(peer, slept, label); !ended.ok()) {
        return done() ? Status() : ended;
      }
      if (slept && options_.interrupted && options_.interrupted()) {
        return Status::error("interrupted before " + label);
      }
      const auto waited = steady_clock::now() - start;
      if (waited > options_.timeout) {
        return Status::error(
            name(peer) + " did not come to " + label + " within " +
            std::to_string(
                std::chrono::duration_cast<std::chrono::seconds>(
                    options_.timeout)
                    .count()) +
            " s");
      }
      theirs.sleepers.fetch_add(1);
      futex_wait(theirs.bell, bell, kSlice);
      theirs.sleepers.fetch_sub(1);
    }
  }

  // Fails if the peer, or any other, will do no more: a peer that waits for a
  // dead one cannot go on either. `deaths`: ask the kernel too.
  Status look_for_end(int peer, bool deaths, const std::string& label) {
    for (int step = 0; step < world_; ++step) {
      const int rank = (peer + step) % world_;
      if (rank == rank_) {
        continue;
      }
      switch (words_[rank].fate.load(std::memory_order_acquire)) {
        case kGaveUp:
          return Status::error(
              name(rank) + " gave up before " + label + ": " +
              words_[rank].reason);
        case kClosed:
          if (rank == peer) {
            return Status::error(
                name(rank) + " dropped its model before " + label);
          }
          break;
        default:
          break;
      }
      if (deaths && processes_[static_cast<size_t>(rank)]->dead()) {
        return Status::error(name(rank) + " is gone: its process has ended before " + label);
      }
    }
    return {};
  }

  std::string name(int rank) const {
    return "rank " + std::to_string(rank) + " of " + std::to_string(world_);
  }

  const std::shared_ptr<SharedSegment> segment_;
  const SharedOptions options_;
  // Only this process speaks for the rank. A forked copy of it (a worker that
  // loads data) has this object too, and may destroy it at any time.
  const pid_t process_;
  const int rank_;
  const int world_;
  at::Tensor control_;
  RankWords* words_ = nullptr;  // in control_, one a rank
  std::vector<std::shared_ptr<Process>> processes_;
  std::atomic<int64_t> next_ = 0;
  std::mutex mutex_;  // guards what follows, and this rank's fate
  std::unique_ptr<Counted> rest_;
  std::vector<at::Tensor> blocks_of_peers_;
};

class SharedTransport final : public Transport {
 public:
  SharedTransport(
      std::unique_ptr<Transport> inner,
      std::unique_ptr<SharedPeers> peers)
      : inner_(std::move(inner)), peers_(std::move(peers)) {}

  void stop_waiting(const std::string& reason) override {
    if (inner_) {
      inner_->stop_waiting(reason);
    }
  }

  std::string name() const override {
    return "shared memory";
  }
  StartResult start_all_gather(const at::Tensor& in, const at::Tensor& out)
      override {
    return inner_ ? inner_->start_all_gather(in, out) : none();
  }
  StartResult start_reduce_scatter(const at::Tensor& in, const at::Tensor& out)
      override {
    return inner_ ? inner_->start_reduce_scatter(in, out) : none();
  }
  StartResult start_all_reduce(const at::Tensor& inout) override {
    return inner_ ? inner_->start_all_reduce(inout) : none();
  }
  PeerMemory* peers() override {
    return peers_.get();
  }
  int64_t scratch_bytes() const override {
    return inner_ ? inner_->scratch_bytes() : 0;
  }

 private:
  static Status none() {
    return Status::error("this transport has no collectives");
  }

  const std::unique_ptr<Transport> inner_;
  const std::unique_ptr<SharedPeers> peers_;
};

}  // namespace

Result<std::unique_ptr<Transport>> make_shared_transport(
    std::unique_ptr<Transport> inner,
    std::shared_ptr<SharedSegment> segment,
    SharedOptions options) {
  auto peers =
      std::make_unique<SharedPeers>(std::move(segment), std::move(options));
  ZERO_RETURN_IF_ERROR(peers->open());
  return std::unique_ptr<Transport>(std::make_unique<SharedTransport>(
      std::move(inner), std::move(peers)));
}

}  // namespace zero
