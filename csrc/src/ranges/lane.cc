#include "zero/lane.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "../aio/quiet_thread.h"
#include "zero/range.h"

namespace zero {
namespace {

struct Transfer {
  std::unique_ptr<const Carried> carried;
  bool ended = false;  // guarded by the row's lock
};

}  // namespace

struct Lane::Row {
  explicit Row(std::string of) : name(std::move(of)), process(::getpid()) {}

  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return !transfers.empty(); });
      const std::shared_ptr<Transfer> transfer = transfers.front();
      lock.unlock();
      {
        const CarriedRange range(*transfer->carried);
        lock.lock();
        changed.wait(lock, [&] { return transfer->ended; });
        lock.unlock();
      }
      transfer->carried.reset();
      lock.lock();
      transfers.pop_front();
      changed.notify_all();
    }
  }

  // Forgets what is under way, and ends the range of the one that is recorded.
  void give_up() {
    std::unique_lock lock(mutex);
    if (transfers.empty()) {
      return;
    }
    transfers.erase(transfers.begin() + 1, transfers.end());
    transfers.front()->ended = true;
    changed.notify_all();
    changed.wait(lock, [this] { return transfers.empty(); });
  }

  const std::string name;
  const pid_t process;
  std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  std::deque<std::shared_ptr<Transfer>> transfers;  // the first is being recorded
  bool has_thread = false;
};

// Rows that no lane has at the moment. Their threads wait for ever.
class Lane::Rows {
 public:
  static Rows& all() {
    static Rows& one = *new Rows;  // outlives every thread
    return one;
  }

  std::shared_ptr<Row> take(std::string name) {
    {
      const std::lock_guard lock(mutex_);
      const auto found = std::find_if(free_.begin(), free_.end(), [&](const auto& row) {
        return row->name == name && row->process == ::getpid();
      });
      if (found != free_.end()) {
        std::shared_ptr<Row> row = std::move(*found);
        free_.erase(found);
        return row;
      }
    }
    return std::make_shared<Row>(std::move(name));
  }

  void give_back(std::shared_ptr<Row> row) {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(row));
  }

 private:
  Rows() {
    // A child of a fork may use the lock, whoever held it; rows of its parent are none of its own.
    (void)::pthread_atfork(
        [] { all().mutex_.lock(); }, [] { all().mutex_.unlock(); }, [] { all().mutex_.unlock(); });
  }

  std::mutex mutex_;  // guards what follows
  std::vector<std::shared_ptr<Row>> free_;
};

Lane::Lane(std::string name) : row_(Rows::all().take(std::move(name))) {}

Lane::~Lane() {
  if (::getpid() != row_->process) {
    // Its lock may be held for ever here.
    (void)new std::shared_ptr<Row>(row_);
    return;
  }
  row_->give_up();
  if (row_->has_thread) {
    Rows::all().give_back(row_);
  }
}

std::shared_ptr<void> Lane::begin(const std::string& what) {
  if (::getpid() != row_->process) {
    return nullptr;
  }
  auto transfer = std::make_shared<Transfer>();
  transfer->carried = Carried::make(name_on(row_->name, what));
  if (transfer->carried == nullptr) {
    return nullptr;
  }
  const std::lock_guard lock(row_->mutex);
  if (!row_->has_thread) {
    auto thread = aio::quiet_thread([row = row_] { row->run(); });
    if (!thread.ok()) {
      return nullptr;  // a profile without this row is better than no training
    }
    // Before its first range: it waits for the lock until then.
    (void)::pthread_setname_np(thread.value().native_handle(), row_->name.c_str());
    thread.value().detach();
    row_->has_thread = true;
  }
  row_->transfers.push_back(transfer);
  row_->changed.notify_all();
  return std::shared_ptr<void>(transfer.get(), [row = row_, transfer](void*) {
    const std::lock_guard ended(row->mutex);
    transfer->ended = true;
    row->changed.notify_all();
  });
}

void Lane::settle() {
  if (::getpid() != row_->process) {
    return;
  }
  std::unique_lock lock(row_->mutex);
  row_->changed.wait(lock, [this] {
    return row_->transfers.empty() || !row_->transfers.front()->ended;
  });
}

}  // namespace zero
