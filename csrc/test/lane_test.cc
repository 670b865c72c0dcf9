// Ranges of transfers on a thread that stands for their lane.

#include <ATen/record_function.h>

#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "zero/lane.h"
#include "zero/range.h"

namespace {

using zero::Lane;
using zero::Range;

struct Event {
  std::string what;
  std::thread::id thread;
};

// What a profiler of this thread hears.
class Heard {
 public:
  Heard() {
    {
      const std::lock_guard lock(mutex());
      events().clear();
    }
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(
                                             [](const at::RecordFunction& fn) {
                                               note("begin ", fn);
                                               return std::unique_ptr<at::ObserverContext>();
                                             },
                                             [](const at::RecordFunction& fn, at::ObserverContext*) {
                                               note("end ", fn);
                                             })
                                             .scopes({at::RecordScope::USER_SCOPE}));
  }
  ~Heard() {
    at::removeCallback(handle_);
  }

  static std::vector<Event> all() {
    const std::lock_guard lock(mutex());
    return events();
  }

  static std::vector<std::string> words() {
    std::vector<std::string> out;
    for (const Event& event : all()) {
      out.push_back(event.what);
    }
    return out;
  }

 private:
  static void note(const std::string& what, const at::RecordFunction& fn) {
    const std::lock_guard lock(mutex());
    events().push_back({what + fn.name(), std::this_thread::get_id()});
  }
  static std::mutex& mutex() {
    static std::mutex one;
    return one;
  }
  static std::vector<Event>& events() {
    static std::vector<Event> all;
    return all;
  }

  at::CallbackHandle handle_;
};

}  // namespace

TEST(a_range_is_heard_where_a_profiler_runs) {
  CHECK_TRUE(!zero::profiled());
  const Heard heard;
  CHECK_TRUE(zero::profiled());
  { const Range range("one"); }
  CHECK_TRUE((Heard::words() == std::vector<std::string>{"begin one", "end one"}));
}

TEST(a_lane_records_nothing_without_a_profiler) {
  Lane lane("nothing");
  CHECK_TRUE(lane.begin("one") == nullptr);
  lane.settle();
}

TEST(transfers_of_a_lane_follow_each_other_on_a_thread_of_their_own) {
  const Heard heard;
  Lane lane("lane");
  auto one = lane.begin("one");
  auto two = lane.begin("two");
  auto again = one;
  two.reset();  // both were under way, and the second one is done first
  one.reset();
  CHECK_TRUE(Heard::words().size() <= 1);  // somebody still holds the first one
  again.reset();
  lane.settle();
  CHECK_TRUE((Heard::words() == std::vector<std::string>{
      "begin zero lane: one", "end zero lane: one", "begin zero lane: two", "end zero lane: two"}));
  const auto all = Heard::all();
  CHECK_TRUE(all.front().thread != std::this_thread::get_id());
  for (const Event& event : all) {
    CHECK_TRUE(event.thread == all.front().thread);
  }
}

TEST(a_lane_that_goes_gives_up_what_is_under_way) {
  const Heard heard;
  std::shared_ptr<void> held;
  {
    Lane lane("lane");
    held = lane.begin("one");
  }
  const auto words = Heard::words();
  CHECK_TRUE(words.empty() || words == (std::vector<std::string>{"begin zero lane: one", "end zero lane: one"}));
  held.reset();
}

TEST(lanes_are_told_by_many_threads_at_once) {
  Lane lane("lane");
  std::vector<std::thread> threads;
  for (int k = 0; k < 4; ++k) {
    threads.emplace_back([&] {
      const Heard heard;
      for (int i = 0; i < 50; ++i) {
        auto held = lane.begin("one");
        std::thread([held = std::move(held)]() mutable { held.reset(); }).join();
        lane.settle();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  lane.settle();
}
