// Range: what a thread does for a while, as torch's profiler shows it.
//
// A profiler that runs is known to the threads that it was started for. A
// thread that works for one of them takes on what that one knows: see Carried.
//
// Threads  A Range begins and ends on one thread, within what it began in. A
//          Carried is made on one thread and used on another one.
#pragma once

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>
#include <string>
#include <string_view>
#include <utility>

namespace zero {

// What a range is called. The lane stands in the name, since a trace does not
// always know the name of the thread whose row it is in.
inline std::string name_on(const std::string& lane, const std::string& what) {
  return "zero " + lane + ": " + what;
}

// Whether something listens to ranges of this thread.
inline bool profiled() {
  return at::hasCallbacks();
}

class Range {
 public:
  explicit Range(std::string name)
      : name_(std::move(name)), record_(at::RecordScope::USER_SCOPE) {
    if (record_.isActive()) {
      record_.before(std::string_view(name_));
    }
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  const std::string name_;  // outlives what refers to it
  at::RecordFunction record_;
};

// What another thread needs for a Range that the maker's profiler sees: of what
// at::ThreadLocalState carries only this, since the rest belongs to Python, and
// would have that thread wait for the GIL.
//
// Ownership  Keeps alive what the profiler collects into.
class Carried {
 public:
  // Null where no profiler runs.
  static std::unique_ptr<const Carried> make(std::string name) {
    return profiled() ? std::unique_ptr<const Carried>(new Carried(std::move(name)))
                      : nullptr;
  }

 private:
  friend class CarriedRange;
  explicit Carried(std::string name)
      : name_(std::move(name)),
        callbacks_(at::get_record_function_tls_()),
        profiler_(c10::ThreadLocalDebugInfo::current()) {}

  const std::string name_;
  const at::RecordFunctionTLS callbacks_;
  const std::shared_ptr<c10::ThreadLocalDebugInfo> profiler_;
};

class CarriedRange {
 public:
  explicit CarriedRange(const Carried& carried)
      : callbacks_(carried.callbacks_),
        profiler_(carried.profiler_),
        range_(carried.name_) {}

 private:
  class Callbacks {
   public:
    explicit Callbacks(const at::RecordFunctionTLS& callbacks)
        : before_(at::get_record_function_tls_()) {
      at::set_record_function_tls_(callbacks);
    }
    ~Callbacks() {
      at::set_record_function_tls_(before_);
    }
    Callbacks(const Callbacks&) = delete;
    Callbacks& operator=(const Callbacks&) = delete;

   private:
    const at::RecordFunctionTLS before_;
  };

  const Callbacks callbacks_;
  const c10::DebugInfoGuard profiler_;
  const Range range_;
};

}  // namespace zero
