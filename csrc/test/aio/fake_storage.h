// A storage in memory that does what a test tells it: a rule sees each transfer
// first and may answer for it, with an errno or with fewer bytes.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "zero/aio/storage.h"

namespace zero::test {

class FakeStorage final : public aio::Storage {
 public:
  // Bytes to move at most, or -errno, or nothing: all of it. Called by one
  // thread at a time.
  using Rule = std::function<std::optional<int64_t>(const aio::Transfer&)>;

  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<char> bytes;
    Rule rule;
    bool held = false;  // transfers wait
    int sync_result = 0;
    std::vector<aio::Transfer> seen;
    std::map<int, std::pair<char*, int64_t>> memory;
  };

  FakeStorage(std::shared_ptr<State> state, int threads) : state_(std::move(state)) {
    for (int i = 0; i < threads; ++i) {
      threads_.emplace_back([this] { work(); });
    }
  }
  ~FakeStorage() override {
    {
      const std::lock_guard lock(state_->mutex);
      stopping_ = true;
    }
    state_->changed.notify_all();
    for (std::thread& thread : threads_) {
      thread.join();
    }
  }

  const char* name() const override {
    return "fake";
  }
  void start(Done done) override {
    const std::lock_guard lock(state_->mutex);
    done_ = std::move(done);
  }
  void submit(aio::Transfer& transfer) override {
    {
      const std::lock_guard lock(state_->mutex);
      queue_.push_back(&transfer);
    }
    state_->changed.notify_all();
  }
  int sync(int) override {
    return state_->sync_result;
  }
  int register_memory(char* data, int64_t size) override {
    const std::lock_guard lock(state_->mutex);
    if (state_->memory.size() >= 2) {
      return -1;  // the table is full
    }
    const int number = state_->memory.contains(0) ? 1 : 0;
    state_->memory[number] = {data, size};
    return number;
  }
  void forget_memory(int number) override {
    const std::lock_guard lock(state_->mutex);
    state_->memory.erase(number);
  }

 private:
  void work() {
    std::unique_lock lock(state_->mutex);
    for (;;) {
      state_->changed.wait(
          lock, [this] { return (stopping_ || !queue_.empty()) && !state_->held; });
      if (queue_.empty()) {
        return;
      }
      aio::Transfer& transfer = *queue_.front();
      queue_.pop_front();
      const int64_t result = move(transfer);
      lock.unlock();
      done_(transfer, result);
      lock.lock();
    }
  }

  int64_t move(aio::Transfer& transfer) {
    state_->seen.push_back(transfer);
    int64_t size = transfer.size;
    if (state_->rule) {
      if (const auto answer = state_->rule(transfer)) {
        if (*answer < 0) {
          return *answer;
        }
        size = std::min(size, *answer);
      }
    }
    const auto end = static_cast<int64_t>(state_->bytes.size());
    size = std::clamp<int64_t>(end - transfer.offset, 0, size);
    char* at = state_->bytes.data() + transfer.offset;
    if (size > 0) {
      std::memcpy(
          transfer.write ? at : transfer.data,
          transfer.write ? transfer.data : at,
          static_cast<size_t>(size));
    }
    return size;
  }

  const std::shared_ptr<State> state_;
  bool stopping_ = false;
  Done done_;
  std::deque<aio::Transfer*> queue_;
  std::vector<std::thread> threads_;
};

}  // namespace zero::test
