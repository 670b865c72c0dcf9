// The I/O engine over a storage that fails on demand, and over the real ones.

#include "zero/aio/engine.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_storage.h"

int main(int argc, char** argv) {
  return check::run_all(argc, argv);
}

namespace {

using zero::Result;
using zero::Status;
using zero::aio::Engine;
using zero::aio::FilePtr;
using zero::aio::kAlign;
using zero::aio::Options;
using zero::aio::RequestPtr;
using zero::aio::Storage;
using zero::aio::Transfer;
using zero::test::FakeStorage;
using zero::test::value_of;

constexpr int kSoon = 20'000;  // milliseconds

// A folder on a disk that is gone at the end.
class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::current_path() / "aio-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) {
      throw std::runtime_error("no folder could be made: " + name);
    }
    path_ = name;
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string operator/(const char* name) const {
    return path_ + "/" + name;
  }

 private:
  std::string path_;
};

// Memory that begins `shift` bytes after a multiple of kAlign.
class Memory {
 public:
  explicit Memory(int64_t size, int64_t shift = 0, int seed = 0)
      : data_(static_cast<char*>(std::aligned_alloc(
            kAlign,
            static_cast<size_t>((size + shift + kAlign) / kAlign * kAlign)))),
        shift_(shift),
        size_(size) {
    std::minstd_rand numbers(static_cast<unsigned>(seed) + 1);
    for (int64_t i = 0; i < size; ++i) {
      get()[i] = static_cast<char>(numbers());
    }
  }
  ~Memory() {
    std::free(data_);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  char* get() const {
    return data_ + shift_;
  }
  std::string text() const {
    return {get(), static_cast<size_t>(size_)};
  }

 private:
  char* const data_;
  const int64_t shift_;
  const int64_t size_;
};

Status outcome(const RequestPtr& request) {
  if (!value_of(request->wait(kSoon))) {
    return Status::error("not done in time");
  }
  const auto failure = request->failure();
  return failure == nullptr ? Status() : failure->status;
}

Status outcome(Result<RequestPtr> request) {
  ZERO_RETURN_IF_ERROR(request.status());
  return outcome(request.value());
}

struct Fake {
  explicit Fake(int64_t nbytes, Options options = {.block_bytes = 8192, .depth = 3}, int threads = 2) {
    state->bytes.resize(static_cast<size_t>(nbytes));
    engine = value_of(Engine::create(std::make_unique<FakeStorage>(state, threads), options));
    file = value_of(engine->open(
        folder / "fake", nbytes, {.create = true, .direct = true, .label = "layers.0.wq"}));
  }
  void hold(bool held) const {
    {
      const std::lock_guard lock(state->mutex);
      state->held = held;
    }
    state->changed.notify_all();
  }

  Folder folder;
  std::shared_ptr<FakeStorage::State> state = std::make_shared<FakeStorage::State>();
  std::unique_ptr<Engine> engine;
  FilePtr file;
};

using Make = Result<std::unique_ptr<Storage>> (*)(int);

std::vector<Make> real_storages() {
  std::vector<Make> all = {&zero::aio::make_thread_storage};
  if (zero::aio::make_uring_storage(4).ok()) {
    all.push_back([](int depth) { return zero::aio::make_uring_storage(depth); });
  }
  return all;
}

// --- cutting, over the fake ---

TEST(aio_a_request_moves_every_byte_once) {
  for (const int64_t size : {0, 1, 4095, 4096, 4097, 30000, 65536, 70001}) {
    for (const int64_t offset : {0, 1, 512, 4096, 5000}) {
      for (const int64_t shift : {int64_t{0}, int64_t{64}, offset % kAlign}) {
        Fake fake(80000);
        const Memory out(size, shift, 7);
        const Memory in(size, shift, 8);
        CHECK_OK(outcome(fake.engine->write(fake.file, out.get(), size, offset, "")));
        int64_t moved = 0;
        for (const Transfer& one : fake.state->seen) {
          moved += one.size;
          CHECK_TRUE(one.size <= 8192);
          if (!one.cached) {
            CHECK_EQ(one.offset % kAlign, 0);
            CHECK_EQ(one.size % kAlign, 0);
            CHECK_EQ(reinterpret_cast<uintptr_t>(one.data) % kAlign, 0U);
          }
        }
        CHECK_EQ(moved, size);
        CHECK_OK(outcome(fake.engine->read(fake.file, in.get(), size, offset, "")));
        CHECK_TRUE(out.text() == in.text());
      }
    }
  }
}

TEST(aio_only_heads_and_tails_go_through_the_page_cache) {
  Fake fake(80000);
  CHECK_TRUE(fake.file->direct());
  const Memory memory(70000, 100);
  CHECK_OK(outcome(fake.engine->write(fake.file, memory.get(), 70000, 100, "")));
  // 100 + 70000 = 17 * 4096 + 468
  CHECK_EQ(fake.engine->counters().bytes_cached, (4096 - 100) + 468);
  CHECK_OK(outcome(fake.engine->write(fake.file, memory.get(), 70000, 0, "")));
  CHECK_EQ(fake.engine->counters().bytes_cached, (4096 - 100) + 468 + 70000);
}

TEST(aio_no_more_than_depth_blocks_are_under_way) {
  Fake fake(1 << 20, {.block_bytes = 4096, .depth = 3}, 1);
  fake.hold(true);
  const Memory memory(1 << 19);
  const auto request = value_of(fake.engine->read(fake.file, memory.get(), 1 << 19, 0, ""));
  CHECK_EQ(fake.engine->counters().in_flight, 3);
  CHECK_TRUE(!request->done());
  CHECK_TRUE(!value_of(request->wait(1)));
  fake.hold(false);
  CHECK_OK(outcome(request));
  CHECK_EQ(fake.engine->counters().in_flight, 0);
  CHECK_EQ(fake.state->seen.size(), 128U);
  CHECK_TRUE(request->end_ns() >= request->begin_ns() && request->begin_ns() > 0);
}

TEST(aio_reads_and_writes_take_turns) {
  Fake fake(1 << 20, {.block_bytes = 4096, .depth = 1}, 1);
  fake.hold(true);
  const Memory memory(64 << 10);
  const auto write = value_of(fake.engine->write(fake.file, memory.get(), 64 << 10, 0, ""));
  const Memory other(16 << 10);
  const auto read = value_of(fake.engine->read(fake.file, other.get(), 16 << 10, 1 << 19, ""));
  fake.hold(false);
  CHECK_OK(outcome(write));
  CHECK_OK(outcome(read));
  std::string order;
  for (const Transfer& one : fake.state->seen) {
    order += one.write ? 'w' : 'r';
  }
  CHECK_EQ(order, "wrwrwrwrwwwwwwwwwwww");
}

TEST(aio_requests_of_a_kind_begin_in_order) {
  Fake fake(1 << 20, {.block_bytes = 4096, .depth = 1}, 1);
  fake.hold(true);
  const Memory memory(64 << 10);
  std::vector<RequestPtr> all;
  for (int i = 7; i >= 0; --i) {
    all.push_back(value_of(fake.engine->read(fake.file, memory.get(), 8192, i * 8192, "")));
  }
  fake.hold(false);
  for (const auto& one : all) {
    CHECK_OK(outcome(one));
  }
  for (size_t i = 0; i < 16; ++i) {
    CHECK_EQ(fake.state->seen[i].offset, static_cast<int64_t>(7 - i / 2) * 8192 + static_cast<int64_t>(i % 2) * 4096);
  }
}

TEST(aio_registered_memory_is_named_in_its_transfers) {
  Fake fake(1 << 20);
  const Memory memory(1 << 16);
  CHECK_TRUE(value_of(fake.engine->register_memory(memory.get(), 1 << 15)));
  CHECK_OK(outcome(fake.engine->read(fake.file, memory.get(), 1 << 16, 0, "")));
  for (const Transfer& one : fake.state->seen) {
    CHECK_EQ(one.memory, one.data < memory.get() + (1 << 15) ? 0 : -1);
  }
  const Memory second(4096);
  const Memory third(4096);
  CHECK_TRUE(value_of(fake.engine->register_memory(second.get(), 4096)));
  CHECK_TRUE(!value_of(fake.engine->register_memory(third.get(), 4096)));
  CHECK_OK(fake.engine->forget_memory(memory.get(), 1 << 15));
  CHECK_EQ(fake.state->memory.size(), 1U);
  fake.state->seen.clear();
  CHECK_OK(outcome(fake.engine->read(fake.file, memory.get(), 4096, 0, "")));
  CHECK_EQ(fake.state->seen[0].memory, -1);
}

// --- faults, over the fake ---

TEST(aio_short_transfers_go_on) {
  for (const int64_t most : {1, 511, 4096, 5000}) {
    Fake fake(40000);
    fake.state->rule = [most](const Transfer&) { return most; };
    const Memory out(20000, 0, 3);
    const Memory in(20000, 0, 4);
    CHECK_OK(outcome(fake.engine->write(fake.file, out.get(), 20000, 4096, "")));
    CHECK_OK(outcome(fake.engine->read(fake.file, in.get(), 20000, 4096, "")));
    CHECK_TRUE(in.text() == out.text());
    CHECK_TRUE(fake.engine->counters().short_transfers > 0);
    CHECK_EQ(fake.engine->counters().bytes_written, 20000);
    for (const Transfer& one : fake.state->seen) {
      CHECK_TRUE(one.cached || (one.offset % kAlign == 0 && one.size % kAlign == 0));
    }
  }
}

TEST(aio_interrupted_transfers_are_repeated) {
  Fake fake(40000);
  fake.state->rule = [n = 0](const Transfer&) mutable -> std::optional<int64_t> {
    return ++n % 3 == 0 ? std::nullopt : std::optional<int64_t>(n % 3 == 1 ? -EINTR : -EAGAIN);
  };
  const Memory memory(20000);
  CHECK_OK(outcome(fake.engine->write(fake.file, memory.get(), 20000, 0, "")));
  fake.state->rule = [](const Transfer&) { return -EAGAIN; };
  CHECK_FAILS(
      outcome(fake.engine->write(fake.file, memory.get(), 20000, 0, "")),
      "Resource temporarily unavailable");
}

TEST(aio_a_failed_block_fails_its_request_and_no_other) {
  for (const bool write : {false, true}) {
    Fake fake(1 << 20);
    fake.state->rule = [](const Transfer& one) -> std::optional<int64_t> {
      return one.offset == 24576 ? std::optional<int64_t>(-EIO) : std::nullopt;
    };
    const Memory memory(1 << 16);
    const auto begin = [&](int64_t offset, const char* label) {
      return value_of(
          write ? fake.engine->write(fake.file, memory.get(), 65536, offset, label)
                : fake.engine->read(fake.file, memory.get(), 65536, offset, label));
    };
    const auto bad = begin(0, "");
    const auto good = begin(65536, "");
    CHECK_FAILS(
        outcome(bad),
        std::string(write ? "write" : "read") + " of 65536 bytes at offset 0 of '" +
            fake.file->path() +
            "' (layers.0.wq) failed at byte 24576: Input/output error; the device failed");
    CHECK_EQ(bad->failure()->at, 24576);
    CHECK_EQ(bad->failure()->status.code(), EIO);
    CHECK_OK(outcome(good));
    CHECK_FAILS(outcome(begin(8192, "another")), "(another) failed at byte 24576");
  }
}

TEST(aio_a_full_disk_says_what_to_do) {
  Fake fake(40000);
  fake.state->rule = [](const Transfer&) { return -ENOSPC; };
  const Memory memory(4096);
  CHECK_FAILS(
      outcome(fake.engine->write(fake.file, memory.get(), 4096, 0, "")),
      "No space left on device; free space there or choose another directory");
  fake.state->rule = [](const Transfer&) { return 0; };
  CHECK_FAILS(
      outcome(fake.engine->write(fake.file, memory.get(), 4096, 0, "")), "takes no more bytes");
}

TEST(aio_a_truncated_file_is_an_error) {
  Fake fake(40000);
  fake.state->bytes.resize(30000);
  const Memory memory(40000);
  const auto request = value_of(fake.engine->read(fake.file, memory.get(), 40000, 0, ""));
  CHECK_FAILS(outcome(request), "should have 40000 bytes: it was truncated");
  CHECK_EQ(request->failure()->status.code(), 0);
}

TEST(aio_direct_transfers_that_are_refused_go_through_the_page_cache) {
  Fake fake(40000);
  fake.state->rule = [](const Transfer& one) -> std::optional<int64_t> {
    return one.cached ? std::nullopt : std::optional<int64_t>(-EINVAL);
  };
  const Memory out(40000, 0, 1);
  const Memory in(40000, 0, 2);
  CHECK_OK(outcome(fake.engine->write(fake.file, out.get(), 40000, 0, "")));
  CHECK_TRUE(!fake.file->direct());
  CHECK_OK(outcome(fake.engine->read(fake.file, in.get(), 40000, 0, "")));
  CHECK_TRUE(in.text() == out.text());
  fake.state->rule = [](const Transfer&) { return -EINVAL; };
  CHECK_FAILS(
      outcome(fake.engine->read(fake.file, in.get(), 40000, 0, "")), "Invalid argument");
}

TEST(aio_sync_tells_of_a_write_that_nobody_waited_for) {
  Fake fake(40000, {.block_bytes = 8192, .depth = 3}, 1);  // one thread: in order
  fake.state->rule = [](const Transfer&) { return -EIO; };
  const Memory memory(8192);
  const auto waited = value_of(fake.engine->write(fake.file, memory.get(), 8192, 0, "a"));
  CHECK_FAILS(outcome(waited), "(a) failed");
  CHECK_OK(fake.engine->sync(fake.file));
  (void)value_of(fake.engine->write(fake.file, memory.get(), 8192, 0, "b"));
  (void)value_of(fake.engine->write(fake.file, memory.get(), 8192, 8192, "c"));
  CHECK_FAILS(fake.engine->sync(fake.file), "(b) failed");
  CHECK_OK(fake.engine->sync(fake.file));
  fake.state->sync_result = -EIO;
  const Status failed = fake.engine->sync(fake.file);
  CHECK_FAILS(failed, "flush of '" + fake.file->path() + "' (layers.0.wq) failed: Input/output error");
  CHECK_EQ(failed.code(), EIO);
}

TEST(aio_closing_cancels_what_has_not_begun_and_waits_for_the_rest) {
  Fake fake(1 << 20, {.block_bytes = 4096, .depth = 2}, 1);
  fake.hold(true);
  const Memory memory(1 << 16);
  const auto begun = value_of(fake.engine->write(fake.file, memory.get(), 4096, 0, ""));
  const auto half = value_of(fake.engine->write(fake.file, memory.get(), 1 << 16, 0, ""));
  const auto never = value_of(fake.engine->read(fake.file, memory.get(), 4096, 0, ""));
  std::thread closer([&] { fake.engine->close(); });
  CHECK_FAILS(outcome(never), "closed before it was done");
  CHECK_TRUE(!begun->done() && !half->done());
  fake.hold(false);
  closer.join();
  CHECK_OK(outcome(begun));
  CHECK_FAILS(outcome(half), "closed before it was done");
  CHECK_FAILS(fake.engine->read(fake.file, memory.get(), 1, 0, ""), "the I/O engine is closed");
  CHECK_FAILS(fake.engine->open(fake.folder / "b", 1, {.create = true}), "the I/O engine is closed");
  CHECK_FAILS(fake.engine->sync(fake.file), "the I/O engine is closed");
  CHECK_FAILS(fake.engine->register_memory(memory.get(), 4096), "the I/O engine is closed");
  CHECK_OK(fake.engine->close_file(fake.file));
  fake.engine->close();
}

TEST(aio_nothing_is_made_by_an_engine_that_is_closed) {
  Fake fake(8192);
  fake.engine->close();
  const std::string path = fake.folder / "late";
  CHECK_FAILS(
      fake.engine->open(path, 8192, {.create = true, .label = "wq"}).status(),
      "late' (wq) could not be opened: the I/O engine is closed");
  CHECK_TRUE(!std::filesystem::exists(path));
  CHECK_OK(fake.engine->settle());
  CHECK_OK(fake.engine->close_file(fake.file));
  fake.engine->close();
}

TEST(aio_settling_waits_for_what_waits_and_what_is_under_way) {
  Fake fake(100'000, {.block_bytes = 4096, .depth = 2});
  fake.hold(true);
  const Memory memory(100'000);
  auto request = value_of(fake.engine->read(fake.file, memory.get(), 100'000, 0, ""));
  std::atomic<bool> settled = false;
  std::thread waits([&] {
    CHECK_OK(fake.engine->settle());
    settled = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK_TRUE(!settled);
  fake.hold(false);
  waits.join();
  CHECK_TRUE(request->done());
}

TEST(aio_messages_call_a_file_by_its_name) {
  Fake fake(8192);
  const auto file = value_of(fake.engine->open(
      fake.folder / "a", 8192, {.create = true, .label = "wq", .name = "states in /nvme"}));
  fake.state->rule = [](const Transfer&) { return -ENOSPC; };
  const Memory memory(8192);
  CHECK_FAILS(
      outcome(fake.engine->write(file, memory.get(), 4096, 4096, "")),
      "write of 4096 bytes at offset 4096 of 'states in /nvme' (wq) failed at byte 4096");
  CHECK_FAILS(
      fake.engine->open(fake.folder / "none", 1, {.name = "states in /nvme"}).status(),
      "'states in /nvme' could not be opened: No such file");
}

TEST(aio_closing_a_file_waits_for_its_requests) {
  Fake fake(1 << 16);
  fake.hold(true);
  const Memory memory(1 << 16);
  const auto request = value_of(fake.engine->write(fake.file, memory.get(), 1 << 16, 0, ""));
  CHECK_TRUE(!value_of(fake.engine->writes_done(fake.file, 1)));
  std::atomic<bool> closed = false;
  std::thread closer([&] {
    (void)fake.engine->close_file(fake.file);
    closed = true;
  });
  CHECK_TRUE(!closed);
  fake.hold(false);
  closer.join();
  CHECK_TRUE(request->done());
  CHECK_FAILS(fake.engine->read(fake.file, memory.get(), 1, 0, ""), "the file is closed");
  CHECK_FAILS(fake.engine->sync(fake.file), "the file is closed");
  CHECK_OK(fake.engine->close_file(fake.file));
}

TEST(aio_what_does_not_fit_is_refused) {
  Fake fake(40000);
  const Memory memory(4096);
  CHECK_FAILS(
      fake.engine->read(fake.file, memory.get(), 4096, 36000, ""),
      "read of 4096 bytes at offset 36000 of '" + fake.file->path() +
          "' (layers.0.wq) is not possible: the file has 40000 bytes");
  CHECK_FAILS(fake.engine->write(fake.file, memory.get(), 1, -1, ""), "is not possible");
  CHECK_FAILS(fake.engine->write(fake.file, memory.get(), -1, 0, ""), "is not possible");
  CHECK_FAILS(fake.engine->write(fake.file, memory.get(), INT64_MAX, 40000, ""), "is not possible");
  for (const int64_t bytes : {int64_t{0}, int64_t{100}, kAlign + 512, int64_t{1} << 31}) {
    CHECK_FAILS(
        Engine::create(std::make_unique<FakeStorage>(fake.state, 1), {.block_bytes = bytes}),
        "block_bytes must be a multiple of 4096");
  }
  for (const int depth : {-1, 0, 1025}) {
    CHECK_FAILS(
        Engine::create(std::make_unique<FakeStorage>(fake.state, 1), {.depth = depth}),
        "depth must be between 1 and 1024");
  }
}

// --- files ---

TEST(aio_files_are_made_once_and_whole) {
  Fake fake(1);
  const std::string path = fake.folder / "a";
  const auto file = value_of(fake.engine->open(path, 12345, {.create = true}));
  CHECK_EQ(std::filesystem::file_size(path), 12345U);
  CHECK_FAILS(fake.engine->open(path, 12345, {.create = true}), "File exists; a file is never overwritten");
  CHECK_OK(fake.engine->open(path, 12345, {}));
  CHECK_FAILS(fake.engine->open(path, 12346, {}), "has 12345 bytes, expected 12346");
  const auto missing = fake.engine->open(fake.folder / "b", 1, {.create = false, .label = "w"});
  CHECK_FAILS(missing, "/b' (w) could not be opened: No such file");
  CHECK_EQ(missing.status().code(), ENOENT);
  CHECK_FAILS(fake.engine->open(fake.folder / "no/b", 1, {.create = true}), "could not be made: No such file");
  CHECK_FAILS(fake.engine->open(fake.folder / ".", 1, {.create = true}), "could not be made");
  CHECK_FAILS(fake.engine->open("/dev/null", 0, {}), "is not a regular file");
  CHECK_FAILS(fake.engine->open(path, -1, {}), "at least 0 bytes");
  // More than any disk has: nothing is left behind.
  CHECK_FAILS(fake.engine->open(fake.folder / "c", int64_t{1} << 60, {.create = true}), "could not be given its");
  CHECK_TRUE(!std::filesystem::exists(fake.folder / "c"));
}

TEST(aio_descriptors_are_closed) {
  const auto open_now = [] {
    return std::distance(
        std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
  };
  for (const Make make : real_storages()) {
    const Folder folder;
    const auto before = open_now();
    for (int i = 0; i < 50; ++i) {
      const auto engine = value_of(Engine::create(value_of(make(2)), {.depth = 2}));
      const std::string name = std::to_string(i);
      const auto kept = value_of(engine->open(folder / name.c_str(), 4096, {.create = true}));
      engine->close();
      CHECK_EQ(open_now(), before);
      const auto other = value_of(Engine::create(value_of(make(2)), {.depth = 2}));
      (void)value_of(other->open(folder / name.c_str(), 4096, {}));
    }
    CHECK_EQ(open_now(), before);
  }
}

// --- the real storages ---

TEST(aio_real_files_hold_what_was_written) {
  for (const Make make : real_storages()) {
    const Folder folder;
    const auto engine = value_of(Engine::create(value_of(make(4)), {.block_bytes = 8192, .depth = 4}));
    constexpr int64_t kSize = 300'001;
    const auto file = value_of(engine->open(folder / "a", kSize + 5000, {.create = true}));
    const Memory registered(kSize, 0, 1);
    (void)value_of(engine->register_memory(registered.get(), kSize));
    const Memory shifted(kSize, 905, 2);
    for (const Memory* out : {&registered, &shifted}) {
      for (const int64_t offset : {0, 5000}) {
        CHECK_OK(outcome(engine->write(file, out->get(), kSize, offset, "")));
        const Memory in(kSize, 0, 3);
        CHECK_OK(outcome(engine->read(file, in.get(), kSize, offset, "")));
        CHECK_TRUE(in.text() == out->text());
        const Memory odd(kSize, offset % kAlign, 3);
        CHECK_OK(outcome(engine->read(file, odd.get(), kSize, offset, "")));
        CHECK_TRUE(odd.text() == out->text());
      }
    }
    CHECK_OK(engine->sync(file));
    CHECK_OK(engine->forget_memory(registered.get(), kSize));
  }
}

TEST(aio_a_real_file_that_is_truncated_is_an_error) {
  for (const Make make : real_storages()) {
    const Folder folder;
    const auto engine = value_of(Engine::create(value_of(make(4)), {.block_bytes = 8192, .depth = 4}));
    const auto file = value_of(engine->open(folder / "a", 100'000, {.create = true}));
    CHECK_EQ(::truncate((folder / "a").c_str(), 50'000), 0);
    const Memory memory(100'000);
    CHECK_FAILS(outcome(engine->read(file, memory.get(), 100'000, 0, "w")), "it was truncated");
    CHECK_OK(outcome(engine->read(file, memory.get(), 50'000, 0, "w")));
  }
}

TEST(aio_threads_share_an_engine) {
  for (const Make make : real_storages()) {
    const Folder folder;
    const auto engine = value_of(Engine::create(value_of(make(6)), {.block_bytes = 4096, .depth = 6}));
    constexpr int64_t kPart = 50'000;  // neighbours share pages
    const auto file = value_of(engine->open(folder / "a", 4 * kPart, {.create = true}));
    std::atomic<int> wrong = 0;
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (int round = 0; round < 20; ++round) {
          const Memory out(kPart, t * kPart % kAlign, t * 100 + round);
          const Memory in(kPart, 0, -1);
          const Status wrote = outcome(engine->write(file, out.get(), kPart, t * kPart, "w"));
          const Status read = outcome(engine->read(file, in.get(), kPart, t * kPart, "w"));
          if (!wrote.ok() || !read.ok() || in.text() != out.text()) {
            ++wrong;
          }
          (void)engine->counters();
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    CHECK_EQ(wrong.load(), 0);
  }
}

TEST(aio_a_forked_child_is_told_and_ends) {
  for (const Make make : real_storages()) {
    const Folder folder;
    auto engine = value_of(Engine::create(value_of(make(2)), {.depth = 2}));
    auto file = value_of(engine->open(folder / "a", 8192, {.create = true}));
    const Memory memory(8192);
    auto request = value_of(engine->write(file, memory.get(), 8192, 0, ""));
    CHECK_OK(outcome(request));
    const pid_t child = ::fork();
    if (child == 0) {
      const auto told = [](const Status& status) {
        return check::contains(status.message(), "make an Engine of its own here");
      };
      bool good = told(engine->read(file, memory.get(), 1, 0, "").status()) &&
          told(engine->open(folder / "b", 1, {.create = true}).status()) &&
          told(engine->sync(file)) && told(engine->close_file(file));
      engine->close();
      request.reset();
      file.reset();
      engine.reset();
      ::_exit(good ? 0 : 1);
    }
    int status = 0;
    CHECK_EQ(::waitpid(child, &status, 0), child);
    CHECK_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK_OK(outcome(engine->write(file, memory.get(), 8192, 0, "")));
  }
}

TEST(aio_signals_go_to_the_threads_of_the_program) {
  for (const Make make : real_storages()) {
    const auto engine = value_of(Engine::create(value_of(make(2)), {.depth = 2}));
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      if (task.path().filename() == std::to_string(::getpid())) {
        continue;
      }
      std::FILE* status = std::fopen((task.path() / "status").c_str(), "r");
      if (status == nullptr) {
        continue;  // ended meanwhile
      }
      char line[256];
      while (std::fgets(line, sizeof(line), status) != nullptr) {
        unsigned long long blocked = 0;
        if (std::sscanf(line, "SigBlk: %llx", &blocked) == 1) {
          CHECK_TRUE((blocked & (1ULL << (SIGINT - 1))) != 0);
        }
      }
      (void)std::fclose(status);
    }
  }
}

}  // namespace
