// Files, and the I/O engine over the real storages: threads, forks, signals.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "io_engines.h"

namespace {

using zero::Status;
using zero::aio::Engine;
using zero::aio::kAlign;
using zero::test::Fake;
using zero::test::Folder;
using zero::test::Make;
using zero::test::Memory;
using zero::test::outcome;
using zero::test::real_storages;
using zero::test::value_of;

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
