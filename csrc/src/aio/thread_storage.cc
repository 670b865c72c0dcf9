#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "quiet_thread.h"
#include "zero/aio/storage.h"

namespace zero::aio {
namespace {

class ThreadStorage final : public Storage {
 public:
  ~ThreadStorage() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) {
      thread.join();
    }
  }

  Status make(int threads) {
    for (int i = 0; i < threads; ++i) {
      auto thread = quiet_thread([this] { work(); });
      ZERO_RETURN_IF_ERROR(thread.status());
      threads_.push_back(std::move(thread.value()));
    }
    return {};
  }

  const char* name() const override {
    return "threads";
  }

  void start(Done done) override {
    const std::lock_guard lock(mutex_);
    done_ = std::move(done);
  }

  void submit(Transfer& transfer) override {
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back(&transfer);
    }
    changed_.notify_one();
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) {
        return;
      }
      Transfer& transfer = *queue_.front();
      queue_.pop_front();
      lock.unlock();
      const auto size = static_cast<size_t>(transfer.size);
      const ssize_t moved = transfer.write
          ? ::pwrite(transfer.fd, transfer.data, size, transfer.offset)
          : ::pread(transfer.fd, transfer.data, size, transfer.offset);
      done_(transfer, moved >= 0 ? moved : -errno);
      lock.lock();
    }
  }

  std::mutex mutex_;  // guards what follows; done_ is constant after start()
  std::condition_variable changed_;
  bool stopping_ = false;
  Done done_;
  std::deque<Transfer*> queue_;
  std::vector<std::thread> threads_;
};

}  // namespace

Result<std::unique_ptr<Storage>> make_thread_storage(int threads) {
  auto storage = std::make_unique<ThreadStorage>();
  ZERO_RETURN_IF_ERROR(storage->make(threads));
  return std::unique_ptr<Storage>(std::move(storage));
}

}  // namespace zero::aio
