// The smallest test harness that says which line failed. Tests register
// themselves; run_all() runs them in order and returns the exit status.
#pragma once

#include <cstdio>
#include <exception>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace check {

struct Test {
  const char* name;
  std::function<void()> body;
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Register {
  Register(const char* name, std::function<void()> body) {
    tests().push_back({name, std::move(body)});
  }
};

[[noreturn]] inline void fail(
    const char* file,
    int line,
    const std::string& what) {
  throw std::runtime_error(
      std::string(file) + ":" + std::to_string(line) + ": " + what);
}

inline bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

// With an argument: only the tests whose names contain it.
inline int run_all(int argc, char** argv) {
  int failed = 0;
  int ran = 0;
  for (const Test& test : tests()) {
    if (argc > 1 && !contains(test.name, argv[1])) {
      continue;
    }
    ++ran;
    try {
      test.body();
    } catch (const std::exception& error) {
      ++failed;
      std::fprintf(stderr, "FAILED %s\n  %s\n", test.name, error.what());
    }
  }
  std::printf("%d tests, %d failed\n", ran, failed);
  return failed == 0 && ran > 0 ? 0 : 1;
}

}  // namespace check

#define TEST(name)                                                \
  static void name();                                             \
  static const ::check::Register register_##name(#name, &(name)); \
  static void name()

#define CHECK_TRUE(condition)                         \
  do {                                                \
    if (!(condition)) {                               \
      ::check::fail(__FILE__, __LINE__, #condition);  \
    }                                                 \
  } while (false)

#define CHECK_EQ(left, right)                                             \
  do {                                                                    \
    const auto check_left_ = (left);                                      \
    const auto check_right_ = (right);                                    \
    if (!(check_left_ == check_right_)) {                                 \
      std::ostringstream check_out_;                                      \
      check_out_ << #left " is " << check_left_ << ", expected "          \
                 << check_right_;                                         \
      ::check::fail(__FILE__, __LINE__, check_out_.str());                \
    }                                                                     \
  } while (false)

// A failed Status or Result whose message contains `part`.
#define CHECK_FAILS(expression, part)                                       \
  do {                                                                      \
    const ::zero::Status check_status_ = ::zero::test::status_of(expression); \
    if (check_status_.ok()) {                                               \
      ::check::fail(__FILE__, __LINE__, #expression " did not fail");       \
    }                                                                       \
    if (!::check::contains(check_status_.message(), part)) {                \
      ::check::fail(__FILE__, __LINE__, check_status_.message());           \
    }                                                                       \
  } while (false)

#define CHECK_OK(expression)                                                \
  do {                                                                      \
    const ::zero::Status check_status_ = ::zero::test::status_of(expression); \
    if (!check_status_.ok()) {                                              \
      ::check::fail(__FILE__, __LINE__, check_status_.message());           \
    }                                                                       \
  } while (false)

#include "zero/status.h"

namespace zero::test {

inline Status status_of(Status status) {
  return status;
}
template <typename T>
Status status_of(const Result<T>& result) {
  return result.status();
}
template <typename T>
T value_of(Result<T> result) {
  if (!result.ok()) {
    throw std::runtime_error(result.status().message());
  }
  return std::move(result.value());
}

}  // namespace zero::test
