// How the I/O engine cuts requests, in which order it does them, and how it ends.

#include <atomic>
#include <chrono>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "io_engines.h"

int main(int argc, char** argv) {
  return check::run_all(argc, argv);
}

namespace {

using zero::aio::RequestPtr;
using zero::aio::Transfer;
using zero::aio::kAlign;
using zero::test::Fake;
using zero::test::Memory;
using zero::test::outcome;
using zero::test::value_of;

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

}  // namespace
