#include "zero/aio/storage.h"

#ifndef ZERO_HAVE_LIBURING

namespace zero::aio {

Result<std::unique_ptr<Storage>> make_uring_storage(int, int) {
  return Status::error("zero_compiler was built without liburing");
}

}  // namespace zero::aio

#else

#include <liburing.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "quiet_thread.h"
#include "zero/aio/file.h"

namespace zero::aio {
namespace {

constexpr int kTable = 256;  // entries of each table of the ring

using Clock = std::chrono::steady_clock;
constexpr auto kSoon = std::chrono::milliseconds(1);

// Which entries of a table are taken.
class Table {
 public:
  int take() {
    for (int i = 0; i < kTable; ++i) {
      if (!taken_[static_cast<size_t>(i)]) {
        taken_[static_cast<size_t>(i)] = true;
        return i;
      }
    }
    return -1;
  }
  void give_back(int number) {
    taken_[static_cast<size_t>(number)] = false;
  }

 private:
  std::array<bool, kTable> taken_ = {};
};

// One thread owns the ring: it submits what others put into the inbox, and
// reaps. An eventfd that the ring reads wakes it. The tables are changed by
// calls of their own, which the kernel orders with the submissions.
//
// A ring that fails for good ends nothing by itself: what the kernel has not
// taken yet fails at once. What it has taken ends as the disk ends it, for the
// memory is the kernel's until then; the thread looks for that without the
// ring's system call. Whatever comes later fails too.
class UringStorage final : public Storage {
 public:
  explicit UringStorage(int patience_ms) : patience_(patience_ms) {}

  ~UringStorage() override {
    if (thread_.joinable()) {
      {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
      }
      wake();
      thread_.join();
    }
    if (made_) {
      io_uring_queue_exit(&ring_);
    }
  }

  Status make(int depth) {
    // One entry more, for the eventfd.
    const auto entries = static_cast<unsigned>(depth) + 1;
    // Completions wait for the thread to look: it has nothing else to do.
    int error = io_uring_queue_init(entries, &ring_, IORING_SETUP_COOP_TASKRUN);
    if (error == -EINVAL) {
      error = io_uring_queue_init(entries, &ring_, 0);  // Linux before 5.19
    }
    if (error != 0) {
      return Status::error(
          std::string("the kernel refuses io_uring: ") + std::strerror(-error), -error);
    }
    made_ = true;
    io_uring_probe* probe = io_uring_get_probe_ring(&ring_);
    bool able = probe != nullptr;
    for (const int needed :
         {IORING_OP_READ, IORING_OP_WRITE, IORING_OP_READ_FIXED, IORING_OP_WRITE_FIXED}) {
      able = able && io_uring_opcode_supported(probe, needed) != 0;
    }
    io_uring_free_probe(probe);
    if (!able) {
      return Status::error("the kernel's io_uring has no reads and writes (Linux before 5.6)");
    }
    files_able_ = io_uring_register_files_sparse(&ring_, kTable) == 0;
    memory_able_ = io_uring_register_buffers_sparse(&ring_, kTable) == 0;
    wake_ = UniqueFd(::eventfd(0, EFD_CLOEXEC));
    if (wake_.get() < 0) {
      return Status::error(std::string("no eventfd: ") + std::strerror(errno), errno);
    }
    auto thread = quiet_thread([this] { work(); });
    ZERO_RETURN_IF_ERROR(thread.status());
    thread_ = std::move(thread.value());
    return {};
  }

  const char* name() const override {
    return "uring";
  }

  void start(Done done) override {
    const std::lock_guard lock(mutex_);
    done_ = std::move(done);
  }

  void submit(Transfer& transfer) override {
    {
      const std::lock_guard lock(mutex_);
      inbox_.push_back(&transfer);
    }
    // The ring's thread looks into the inbox before it sleeps.
    if (std::this_thread::get_id() != thread_.get_id()) {
      wake();
    }
  }

  Status trouble() override {
    const std::lock_guard lock(mutex_);
    return trouble_;
  }

  int register_file(int fd) override {
    const std::lock_guard lock(mutex_);
    const int number = files_able_ ? files_.take() : -1;
    if (number >= 0 &&
        io_uring_register_files_update(&ring_, static_cast<unsigned>(number), &fd, 1) != 1) {
      files_.give_back(number);
      return -1;
    }
    return number;
  }

  void forget_file(int number) override {
    const std::lock_guard lock(mutex_);
    const int none = -1;
    if (number >= 0 &&
        io_uring_register_files_update(&ring_, static_cast<unsigned>(number), &none, 1) == 1) {
      files_.give_back(number);
    }
  }

  int register_memory(char* data, int64_t size) override {
    const std::lock_guard lock(mutex_);
    const int number = memory_able_ ? memory_.take() : -1;
    if (number >= 0 && !set_memory(number, data, static_cast<size_t>(size))) {
      memory_.give_back(number);
      return -1;
    }
    return number;
  }

  void forget_memory(int number) override {
    const std::lock_guard lock(mutex_);
    if (number >= 0 && set_memory(number, nullptr, 0)) {
      memory_.give_back(number);
    }
  }

 private:
  bool set_memory(int number, char* data, size_t size) {
    const iovec piece{.iov_base = data, .iov_len = size};
    const __u64 tag = 0;
    return io_uring_register_buffers_update_tag(
               &ring_, static_cast<unsigned>(number), &piece, &tag, 1) == 1;
  }

  void wake() {
    const uint64_t one = 1;
    // Fails only where the counter is full, and then the thread is awake.
    (void)!::write(wake_.get(), &one, sizeof(one));
  }

  void listen() {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    io_uring_prep_read(entry, wake_.get(), &woken_, sizeof(woken_), 0);
    io_uring_sqe_set_data(entry, nullptr);
    prepared_.push_back(nullptr);
  }

  // The engine never has more under way than the ring has entries.
  void prepare(Transfer& transfer) {
    io_uring_sqe* entry = io_uring_get_sqe(&ring_);
    const int fd = transfer.file >= 0 ? transfer.file : transfer.fd;
    const auto size = static_cast<unsigned>(transfer.size);
    const auto offset = static_cast<__u64>(transfer.offset);
    if (transfer.memory >= 0) {
      if (transfer.write) {
        io_uring_prep_write_fixed(entry, fd, transfer.data, size, offset, transfer.memory);
      } else {
        io_uring_prep_read_fixed(entry, fd, transfer.data, size, offset, transfer.memory);
      }
    } else if (transfer.write) {
      io_uring_prep_write(entry, fd, transfer.data, size, offset);
    } else {
      io_uring_prep_read(entry, fd, transfer.data, size, offset);
    }
    // The kernel would copy from its page cache in this thread, one block after
    // the other.
    const unsigned flags = (transfer.file >= 0 ? IOSQE_FIXED_FILE : 0U) |
        (transfer.cached ? IOSQE_ASYNC : 0U);
    io_uring_sqe_set_flags(entry, flags);
    io_uring_sqe_set_data(entry, &transfer);
    prepared_.push_back(&transfer);
    ++under_way_;
  }

  void work() {
    listen();
    while (take()) {
      for (Transfer* transfer : taken_) {
        prepare(*transfer);
      }
      const int error = io_uring_submit_and_wait(&ring_, 1);
      // The kernel takes entries in order, and maybe fewer than there are.
      while (prepared_.size() > io_uring_sq_ready(&ring_)) {
        if (prepared_.front() != nullptr) {
          in_kernel_.insert(prepared_.front());
        }
        prepared_.pop_front();
      }
      if (!goes_on(error) || !reap()) {
        give_up(error);
        return;
      }
    }
  }

  // Waits for nothing. False: the storage is to end, and has nothing to do.
  bool take() {
    taken_.clear();
    const std::lock_guard lock(mutex_);
    taken_.swap(inbox_);
    return !(stopping_ && taken_.empty() && under_way_ == 0);
  }

  void end(Transfer& transfer, int64_t result) {
    --under_way_;
    done_(transfer, result);
  }

  // Whether the ring can be used after its system call returned `error`.
  bool goes_on(int error) {
    if (error >= 0 || error == -EINTR) {
      refused_since_.reset();
      return true;
    }
    if (error != -EAGAIN && error != -EBUSY) {
      return false;
    }
    // The kernel is short of memory, or has no room for what landed. What it did
    // not take stays in the ring; what landed is reaped now.
    std::this_thread::sleep_for(kSoon);
    if (!in_kernel_.empty() || under_way_ == 0) {
      refused_since_.reset();
      return true;
    }
    if (!refused_since_) {
      refused_since_ = Clock::now();
    }
    return Clock::now() - *refused_since_ < patience_;
  }

  // Hands on what landed. False: the ring does not wake this thread any more.
  bool reap() {
    landed_.clear();
    unsigned head = 0;
    unsigned seen = 0;
    int woke = 0;
    bool wakes = true;
    io_uring_cqe* entry = nullptr;
    io_uring_for_each_cqe(&ring_, head, entry) {
      ++seen;
      auto* transfer = static_cast<Transfer*>(io_uring_cqe_get_data(entry));
      if (transfer == nullptr) {
        ++woke;
        wakes = entry->res >= 0 || entry->res == -EINTR || entry->res == -EAGAIN ||
            entry->res == -ECANCELED;
      } else if (in_kernel_.erase(transfer) > 0) {  // else it was given up
        landed_.emplace_back(transfer, entry->res);
      }
    }
    io_uring_cq_advance(&ring_, seen);
    if (woke > 0 && wakes && !gave_up_) {
      listen();
    }
    for (const auto& [transfer, result] : landed_) {
      end(*transfer, result);
    }
    return wakes;
  }

  void give_up(int error) {
    gave_up_ = true;
    {
      const std::lock_guard lock(mutex_);
      const int code = error < 0 ? -error : EIO;
      trouble_ = Status::error(
          std::string("the kernel's io_uring failed (") + std::strerror(code) +
              "), and this Engine moves nothing any more; make another one, maybe with "
              "backend=\"threads\"",
          code);
    }
    for (Transfer* transfer : std::exchange(prepared_, {})) {
      if (transfer != nullptr) {
        end(*transfer, kStorageFailed);
      }
    }
    auto last = Clock::now();
    while (take()) {
      for (Transfer* transfer : taken_) {
        done_(*transfer, kStorageFailed);
      }
      const size_t before = in_kernel_.size();
      (void)reap();
      if (in_kernel_.size() != before) {
        last = Clock::now();
      }
      if (Clock::now() - last > 3 * patience_) {
        for (Transfer* transfer : std::exchange(in_kernel_, {})) {
          end(*transfer, kStorageFailed);
        }
      }
      // Entering the kernel brings about what has landed there. Nothing wakes
      // this thread now: the ring's own read may take what the eventfd has.
      std::this_thread::sleep_for(in_kernel_.empty() ? 5 * kSoon : kSoon);
    }
  }

  io_uring ring_ = {};
  bool made_ = false;
  bool files_able_ = false;
  bool memory_able_ = false;
  UniqueFd wake_;
  uint64_t woken_ = 0;
  const std::chrono::milliseconds patience_;
  // The thread's own: entries in the ring that the kernel has not taken (null:
  // that which listens), transfers that it has, and since when it takes none.
  std::deque<Transfer*> prepared_;
  std::unordered_set<Transfer*> in_kernel_;
  int64_t under_way_ = 0;  // transfers of both kinds
  bool gave_up_ = false;
  std::optional<Clock::time_point> refused_since_;
  std::vector<Transfer*> taken_;
  std::vector<std::pair<Transfer*, int>> landed_;

  std::mutex mutex_;  // guards what follows; done_ is constant after start()
  bool stopping_ = false;
  Status trouble_;
  Done done_;
  std::vector<Transfer*> inbox_;
  Table files_;
  Table memory_;
  std::thread thread_;
};

}  // namespace

Result<std::unique_ptr<Storage>> make_uring_storage(int depth, int patience_ms) {
  auto storage = std::make_unique<UringStorage>(patience_ms);
  ZERO_RETURN_IF_ERROR(storage->make(depth));
  return std::unique_ptr<Storage>(std::move(storage));
}

}  // namespace zero::aio

#endif  // ZERO_HAVE_LIBURING
