// The ring of the kernel when its system call fails: the library's function is
// replaced by one that answers as a test says.
#ifdef ZERO_HAVE_LIBURING

#include <dlfcn.h>
#include <liburing.h>
#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "io_engines.h"

namespace {

// The errno that the next calls return, and how many of them (-1: all).
std::atomic<int> answer = 0;
std::atomic<int> answers = 0;
// The kernel takes one entry of those calls before they fail, and no more.
std::atomic<bool> takes_one = false;

int submit(io_uring* ring, unsigned wait) {
  using Submit = int (*)(io_uring*, unsigned);
  static const auto real =
      reinterpret_cast<Submit>(::dlsym(RTLD_NEXT, "io_uring_submit_and_wait"));
  if (answers == 0) {
    return real(ring, wait);
  }
  if (answers > 0) {
    --answers;
  }
  if (takes_one.exchange(false) && io_uring_sq_ready(ring) > 1) {
    const unsigned tail = ring->sq.sqe_tail;
    ring->sq.sqe_tail = ring->sq.sqe_head + 1;
    const int taken = real(ring, 0);
    ring->sq.sqe_tail = tail;
    return taken < 0 ? taken : -answer;
  }
  return -answer;
}

}  // namespace

extern "C" int io_uring_submit_and_wait(io_uring* ring, unsigned wait) {
  return submit(ring, wait);
}

namespace {

using zero::Status;
using zero::aio::Engine;
using zero::aio::FilePtr;
using zero::aio::RequestPtr;
using zero::test::outcome;
using zero::test::value_of;

constexpr int kPatience = 200;  // milliseconds
constexpr int64_t kBlock = 4096;
constexpr int64_t kSize = 16 * kBlock;

struct Ring {
  Ring() {
    std::string name = "uring-test-XXXXXX";
    const int fd = ::mkstemp(name.data());
    CHECK_EQ(::ftruncate(fd, kSize), 0);
    (void)::close(fd);
    auto storage = zero::aio::make_uring_storage(4, kPatience);
    if (storage.ok()) {
      engine = value_of(Engine::create(
          std::move(storage.value()), {.block_bytes = kBlock, .depth = 4}));
      file = value_of(engine->open(name, kSize, {.label = "wq"}));
    } else {
      std::fprintf(stderr, "skipped: %s\n", storage.status().message().c_str());
    }
    (void)::unlink(name.c_str());
  }
  ~Ring() {
    engine.reset();
    answers = 0;
    takes_one = false;
  }
  Status write() {
    return outcome(value_of(engine->write(file, memory.get(), kSize, 0, "")));
  }

  struct Free {
    void operator()(char* data) const {
      std::free(data);
    }
  };
  std::unique_ptr<char, Free> memory{
      static_cast<char*>(std::aligned_alloc(kBlock, kSize))};
  std::unique_ptr<Engine> engine;
  FilePtr file;
};

TEST(aio_uring_refusals_that_pass_are_not_told) {
  for (const int error : {EINTR, EAGAIN, EBUSY}) {
    for (const bool partly : {false, true}) {
      Ring ring;
      if (ring.engine == nullptr) {
        return;
      }
      std::memset(ring.memory.get(), error, kSize);
      answer = error;
      takes_one = partly;
      answers = 5;
      CHECK_OK(ring.write());
      std::memset(ring.memory.get(), 0, kSize);
      CHECK_OK(outcome(
          value_of(ring.engine->read(ring.file, ring.memory.get(), kSize, 0, ""))));
      for (int64_t i = 0; i < kSize; ++i) {
        CHECK_EQ(ring.memory.get()[i], static_cast<char>(error));
      }
      CHECK_EQ(ring.engine->counters().in_flight, 0);
    }
  }
}

TEST(aio_uring_a_ring_that_fails_fails_its_requests_and_later_ones) {
  for (const int error : {EBADF, EFAULT, ENXIO}) {
    for (const bool partly : {false, true}) {
      Ring ring;
      if (ring.engine == nullptr) {
        return;
      }
      std::memset(ring.memory.get(), 0, kSize);
      CHECK_OK(ring.write());
      answer = error;
      takes_one = partly;
      answers = -1;
      // Several at once, of which some wait in the engine.
      std::vector<RequestPtr> requests;
      for (int i = 0; i < 3; ++i) {
        requests.push_back(
            value_of(ring.engine->write(ring.file, ring.memory.get(), kSize, 0, "")));
      }
      for (const RequestPtr& request : requests) {
        const Status told = outcome(request);
        CHECK_EQ(told.code(), error);
        CHECK_FAILS(told, "(wq) failed at byte");
        CHECK_FAILS(told, "the kernel's io_uring failed");
      }
      CHECK_EQ(ring.engine->counters().in_flight, 0);
      answers = 0;  // it is over with this ring, whatever the kernel says now
      CHECK_EQ(ring.write().code(), error);
      CHECK_OK(ring.engine->settle());
    }
  }
}

TEST(aio_uring_a_kernel_that_takes_nothing_for_long_fails_the_requests) {
  Ring ring;
  if (ring.engine == nullptr) {
    return;
  }
  answer = EAGAIN;
  answers = -1;
  CHECK_EQ(ring.write().code(), EAGAIN);
}

}  // namespace

#endif  // ZERO_HAVE_LIBURING
