// Status and Result: how the engine reports failure.
//
// The engine throws nothing across its own interfaces; the bindings turn a
// failed Status into a Python exception. Both types are plain values: copy and
// move them freely, share them between threads as you would a std::string.
#pragma once

#include <optional>
#include <string>
#include <utility>

namespace zero {

class [[nodiscard]] Status {
 public:
  Status() = default;  // success
  static Status error(std::string message, int code = 0) {
    Status status;
    status.message_ = std::move(message);
    status.code_ = code;
    return status;
  }

  bool ok() const {
    return !message_.has_value();
  }
  // The reason. Empty on success.
  std::string message() const {
    return message_.value_or(std::string());
  }
  // The errno behind the reason, or 0 where there is none.
  int code() const {
    return code_;
  }

 private:
  std::optional<std::string> message_;
  int code_ = 0;
};

template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Status status) : status_(std::move(status)) {}

  bool ok() const {
    return status_.ok();
  }
  const Status& status() const {
    return status_;
  }
  // Only when ok().
  T& value() {
    return *value_;
  }

 private:
  Status status_;
  std::optional<T> value_;
};

}  // namespace zero

// Leaves the enclosing function with the failed Status of `expression`.
#define ZERO_RETURN_IF_ERROR(expression)               \
  do {                                                 \
    if (::zero::Status zero_status_ = (expression);    \
        !zero_status_.ok()) {                          \
      return zero_status_;                             \
    }                                                  \
  } while (false)
