// Ranks as threads of one process.
#pragma once

#include <exception>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace zero::test {

// Runs `body(rank)` on every rank and throws what failed, after all have ended.
// `failed(rank)` is called on a rank that fails, before it ends.
inline void on_ranks(
    int world,
    const std::function<void(int)>& body,
    const std::function<void(int)>& failed = {}) {
  std::mutex mutex;
  std::string failure;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        const std::lock_guard lock(mutex);
        failure += "rank " + std::to_string(rank) + ": " + error.what() + "\n";
        if (failed) {
          failed(rank);
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  if (!failure.empty()) {
    throw std::runtime_error(failure);
  }
}

}  // namespace zero::test
