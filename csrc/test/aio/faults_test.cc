// Transfers that fail, over a storage that fails on demand, and requests that do not fit.

#include <cerrno>
#include <memory>
#include <optional>
#include <string>

#include "io_engines.h"

namespace {

using zero::Status;
using zero::aio::Engine;
using zero::aio::Transfer;
using zero::aio::kAlign;
using zero::test::Fake;
using zero::test::FakeStorage;
using zero::test::Memory;
using zero::test::outcome;
using zero::test::value_of;

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

}  // namespace
