// Ranks that share memory: as threads over one mapping, so that sanitizers see
// each access, and as forked processes.

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "ranks.h"
#include "zero/engine.h"
#include "zero/shared_segment.h"
#include "zero/shared_transport.h"
#include "zero/sum.h"

namespace {

using at::Tensor;
using std::chrono::milliseconds;
using zero::Engine;
using zero::PeerMemory;
using zero::SharedSegment;
using zero::test::value_of;
using Body = std::function<void(Engine&, int)>;

constexpr int64_t kSpace = int64_t{1} << 30;
constexpr int64_t kChunk = 1031;  // elements; odd, and more than a block of sums

std::unique_ptr<Engine> make_engine(
    const std::shared_ptr<SharedSegment>& segment,
    int rank,
    const std::vector<pid_t>& pids,
    milliseconds timeout = std::chrono::seconds(20)) {
  auto transport = value_of(zero::make_shared_transport(
      nullptr, segment,
      {.rank = rank,
       .pids = pids,
       .timeout = timeout,
       .rest_bytes = 0,
       .interrupted = {}}));
  return std::make_unique<Engine>(
      std::move(transport), rank, static_cast<int>(pids.size()));
}

void on_threads(int world, const Body& body) {
  const auto segment = value_of(SharedSegment::create(kSpace));
  const std::vector<pid_t> pids(static_cast<size_t>(world), ::getpid());
  zero::test::on_ranks(world, [&](int rank) {
    body(*make_engine(segment, rank, pids), rank);
  });
}

// Exit statuses of the ranks, each a child process.
std::vector<int> on_processes(int world, const Body& body) {
  const auto segment = value_of(SharedSegment::create(kSpace));
  std::fflush(nullptr);
  // Children learn each other's numbers through a pipe of their own each.
  std::vector<pid_t> pids;
  std::vector<int> writers;
  for (int rank = 0; rank < world; ++rank) {
    int ends[2];
    CHECK_EQ(::pipe(ends), 0);
    const pid_t pid = ::fork();
    if (pid == 0) {
      std::vector<pid_t> all(static_cast<size_t>(world));
      const size_t bytes = all.size() * sizeof(pid_t);
      if (::read(ends[0], all.data(), bytes) != static_cast<ssize_t>(bytes)) {
        ::_exit(3);
      }
      int status = 0;
      try {
        const auto own = value_of(SharedSegment::open(segment->fd(), kSpace));
        const auto engine = make_engine(own, rank, all);
        body(*engine, rank);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        status = 2;
      }
      ::_exit(status);
    }
    (void)::close(ends[0]);
    pids.push_back(pid);
    writers.push_back(ends[1]);
  }
  for (const int writer : writers) {
    const size_t bytes = pids.size() * sizeof(pid_t);
    CHECK_EQ(
        ::write(writer, pids.data(), bytes), static_cast<ssize_t>(bytes));
    (void)::close(writer);
  }
  std::vector<int> statuses;
  for (const pid_t pid : pids) {
    int status = 0;
    CHECK_EQ(::waitpid(pid, &status, 0), pid);
    statuses.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : -1);
  }
  return statuses;
}

Tensor numbers(int64_t first, int64_t count) {
  return at::arange(first, first + count).to(at::kFloat);
}

void pause(int rank, int late, int step) {
  if (rank == late && step % 3 == 0) {
    std::this_thread::sleep_for(milliseconds(3));
  }
}

// Two gathers that take turns in one slot, a reduction beside them, and a write
// to the shard as soon as the call is over.
void steps(Engine& engine, int rank, int world, int late, int count) {
  const int slots =
      value_of(engine.add_shared_arena(1 << 20, PeerMemory::Space::kSlots));
  const int own =
      value_of(engine.add_shared_arena(1 << 20, PeerMemory::Space::kOwn));
  const auto add_gather = [&](const char* label) {
    zero::GatherSpec spec;
    spec.arena = slots;
    spec.dtype = at::kBFloat16;
    spec.label = label;
    spec.params = {{kChunk, {world * kChunk}, 512}};
    return value_of(engine.add_gather(spec));
  };
  const int first = add_gather("first");
  const int second = add_gather("second");
  zero::ReduceSpec spec;
  spec.arena = own;
  spec.label = "gradient";
  spec.params = {{kChunk, {world * kChunk - 1}}, {3, {3 * world}}};
  spec.staging_offset = 0;
  spec.divisor = world;
  const int reduce = value_of(engine.add_reduce(spec));
  spec.replicated = true;
  spec.params = {{5, {5}}};
  spec.staging_offset = 64 * 1024;
  const int scalars = value_of(engine.add_reduce(spec));

  Tensor shard = at::full({kChunk}, rank, at::kFloat);
  for (int step = 0; step < count; ++step) {
    pause(rank, late, step);
    for (const int gather : {first, second, first}) {
      CHECK_OK(engine.gather_start(gather, {shard}));
      const auto full = value_of(engine.gather_wait(gather));
      for (int k = 0; k < world; ++k) {
        const auto want = at::full({kChunk}, (step + k) % 128, at::kBFloat16);
        CHECK_TRUE(at::equal(full[0].narrow(0, k * kChunk, kChunk), want));
      }
      pause(rank, late, step + 1);
      CHECK_OK(engine.release(gather));
    }
    CHECK_OK(engine.reduce_start(
        reduce,
        {numbers(rank + step, world * kChunk - 1), numbers(0, 3 * world)}));
    CHECK_OK(engine.reduce_start(scalars, {numbers(rank, 5)}));
    const auto out = value_of(engine.reduce_wait(reduce));
    const double mean = (world - 1) / 2.0;
    Tensor want = numbers(step + rank * kChunk, kChunk).add(mean);
    if (rank == world - 1) {
      want.narrow(0, kChunk - 1, 1).zero_();  // padding
    }
    CHECK_TRUE(at::equal(out[0], want));
    CHECK_TRUE(at::equal(out[1], numbers(rank * 3, 3)));
    const auto all = value_of(engine.reduce_wait(scalars));
    CHECK_TRUE(at::equal(all[0], numbers(0, 5).add(mean)));
    CHECK_OK(engine.leave());
    shard.fill_((step + 1 + rank) % 128);
  }
}

TEST(shared_ranks_as_threads_agree_whoever_is_late) {
  for (const int world : {2, 3}) {
    for (int late = -1; late < world; ++late) {
      on_threads(world, [&](Engine& engine, int rank) {
        steps(engine, rank, world, late, 12);
      });
    }
  }
}

TEST(shared_ranks_as_processes_agree) {
  const auto statuses = on_processes(
      3, [](Engine& engine, int rank) { steps(engine, rank, 3, 1, 20); });
  for (const int status : statuses) {
    CHECK_EQ(status, 0);
  }
}

// What rests in shared memory is read there, with no copy and no transfer: a
// rank writes its rows between calls, and reads those of all inside one.
TEST(shared_rows_at_rest_change_only_between_calls) {
  constexpr int kWorld = 3;
  constexpr int kSteps = 60;
  constexpr int kRestSpace = 1;
  const auto segment = value_of(SharedSegment::create(kSpace));
  const std::vector<pid_t> pids(kWorld, ::getpid());
  std::barrier entrance(kWorld);  // behind it every rank is in the call
  zero::test::on_ranks(
      kWorld,
      [&](int rank) {
        const auto engine = make_engine(segment, rank, pids);
        const Tensor block = value_of(segment->block(
            kRestSpace, kWorld * kChunk * sizeof(int64_t), true));
        const auto rest = static_cast<int64_t*>(block.mutable_data_ptr());
        const auto own = rest + rank * kChunk;
        for (int64_t step = 1; step <= kSteps; ++step) {
          std::fill(own, own + kChunk, step);
          entrance.arrive_and_wait();
          pause(rank, static_cast<int>(step / 3) % kWorld, static_cast<int>(step));
          CHECK_EQ(
              std::count(rest, rest + kWorld * kChunk, step), kWorld * kChunk);
          CHECK_OK(engine->leave());
        }
      },
      [&](int /*rank*/) { entrance.arrive_and_drop(); });
}

// Without a gather's copy being possible at once: the peer still reads what lies
// there. The copy is made in the wait.
TEST(shared_copy_waits_for_the_last_reader) {
  on_threads(2, [](Engine& engine, int rank) {
    const int slots =
        value_of(engine.add_shared_arena(1 << 16, PeerMemory::Space::kSlots));
    zero::GatherSpec spec;
    spec.arena = slots;
    spec.label = "w";
    spec.params = {{64, {128}, 0}};
    const int gather = value_of(engine.add_gather(spec));
    for (int step = 0; step < 50; ++step) {
      CHECK_OK(engine.gather_start(
          gather, {at::full({64}, step * 2 + rank, at::kFloat)}));
      const auto full = value_of(engine.gather_wait(gather));
      std::this_thread::sleep_for(milliseconds(rank == step % 2 ? 2 : 0));
      CHECK_EQ(full[0].const_data_ptr<float>()[0], static_cast<float>(step * 2));
      CHECK_EQ(full[0].const_data_ptr<float>()[127], static_cast<float>(step * 2 + 1));
      CHECK_OK(engine.release(gather));
    }
  });
}

TEST(shared_arenas_grow_between_calls) {
  on_threads(2, [](Engine& engine, int rank) {
    const int own =
        value_of(engine.add_shared_arena(0, PeerMemory::Space::kOwn));
    for (int64_t numel = 1000; numel < 3'000'000; numel *= 10) {
      (void)value_of(engine.grow_arena(own, numel * 4));
      zero::ReduceSpec spec;
      spec.arena = own;
      spec.label = "g";
      spec.params = {{numel / 2, {numel}}};
      spec.staging_offset = 0;
      spec.divisor = 2;
      const int reduce = value_of(engine.add_reduce(spec));
      CHECK_OK(engine.reduce_start(reduce, {at::full({numel}, rank, at::kFloat)}));
      const auto out = value_of(engine.reduce_wait(reduce));
      CHECK_TRUE(at::equal(out[0], at::full({numel / 2}, 0.5, at::kFloat)));
      CHECK_OK(engine.leave());
    }
    CHECK_EQ(engine.counters().arena_bytes, 0);
    CHECK_TRUE(engine.counters().shared_bytes > 0);
  });
}

TEST(shared_peer_that_gives_up_tells_why) {
  on_threads(2, [](Engine& engine, int rank) {
    CHECK_OK(engine.leave());
    if (rank == 1) {
      std::this_thread::sleep_for(milliseconds(20));
      engine.abandon("the roof fell in");
      CHECK_FAILS(engine.leave(), "the roof fell in");
      return;
    }
    CHECK_FAILS(engine.leave(), "rank 1 of 2");
    CHECK_FAILS(engine.leave(), "the roof fell in");
  });
}

TEST(shared_peer_that_is_gone_is_named) {
  on_threads(2, [](Engine& engine, int rank) {
    if (rank == 1) {
      engine.close();
      return;
    }
    CHECK_FAILS(engine.leave(), "dropped its model");
  });
}

// A process that loads data for a rank is a forked copy of it, engine and all.
TEST(shared_forked_copy_speaks_for_nobody) {
  const auto statuses = on_processes(2, [](Engine& engine, int /*rank*/) {
    const pid_t child = ::fork();
    if (child == 0) {
      engine.abandon("the copy ended");
      engine.close();
      ::_exit(0);
    }
    int status = -1;
    CHECK_EQ(::waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    CHECK_OK(engine.leave());
  });
  CHECK_EQ(statuses[0], 0);
  CHECK_EQ(statuses[1], 0);
}

TEST(shared_dead_process_is_named) {
  const auto begin = std::chrono::steady_clock::now();
  const auto statuses = on_processes(3, [](Engine& engine, int rank) {
    CHECK_OK(engine.leave());
    if (rank == 1) {
      (void)::kill(::getpid(), SIGKILL);
    }
    CHECK_FAILS(engine.leave(), "rank 1 of 3");
  });
  CHECK_EQ(statuses[0], 0);
  CHECK_EQ(statuses[1], -1);
  CHECK_EQ(statuses[2], 0);
  CHECK_TRUE(
      std::chrono::steady_clock::now() - begin < std::chrono::seconds(15));
}

TEST(shared_late_peer_is_named) {
  const auto segment = value_of(SharedSegment::create(kSpace));
  const auto engine = make_engine(
      segment, 0, {::getpid(), ::getpid()}, milliseconds(1100));
  const auto left = engine->leave();
  CHECK_FAILS(left, "the end of a call failed on rank 0 of 2");
  CHECK_FAILS(left, "did not come to the end of a call within 1 s");
}

TEST(shared_wait_can_be_interrupted) {
  const auto segment = value_of(SharedSegment::create(kSpace));
  int asked = 0;
  auto transport = value_of(zero::make_shared_transport(
      nullptr, segment,
      {.rank = 0,
       .pids = {::getpid(), ::getpid()},
       .timeout = std::chrono::seconds(20),
       .rest_bytes = 0,
       .interrupted = [&] { return ++asked == 2; }}));
  Engine engine(std::move(transport), 0, 2);
  CHECK_FAILS(engine.leave(), "interrupted");
}

TEST(shared_segment_is_used_once) {
  const auto segment = value_of(SharedSegment::create(kSpace));
  { const auto engine = make_engine(segment, 0, {::getpid(), ::getpid()}); }
  CHECK_FAILS(
      zero::make_shared_transport(
          nullptr, segment,
          {.rank = 0,
           .pids = {::getpid(), ::getpid()},
           .timeout = milliseconds(1),
           .rest_bytes = 0,
           .interrupted = {}}),
      "used already");
}

TEST(shared_plan_that_overlaps_is_refused) {
  on_threads(2, [](Engine& engine, int /*rank*/) {
    const int slots =
        value_of(engine.add_shared_arena(1 << 16, PeerMemory::Space::kSlots));
    zero::GatherSpec spec;
    spec.arena = slots;
    spec.label = "one";
    spec.params = {{64, {128}, 0}};
    const int one = value_of(engine.add_gather(spec));
    spec.label = "two";
    spec.params = {{64, {128}, 256}};
    const int two = value_of(engine.add_gather(spec));
    const Tensor shard = at::zeros({64}, at::kFloat);
    CHECK_OK(engine.gather_start(one, {shard}));
    CHECK_FAILS(engine.gather_start(two, {shard}), "'one' still uses");
    CHECK_OK(engine.gather_wait(one));
  });
}

TEST(sums_round_after_each_addition) {
  const int64_t count = 5000;
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf, at::kDouble}) {
    for (const double divisor : {1.0, 3.0, 4.0}) {
      std::vector<Tensor> parts;
      std::vector<const void*> data;
      for (int k = 0; k < 3; ++k) {
        parts.push_back(numbers(k, count).mul(0.37).to(dtype));
        data.push_back(parts.back().const_data_ptr());
      }
      const Tensor want = parts[0].add(parts[1]).add(parts[2]).div(
          at::full({}, divisor, at::TensorOptions(dtype)));
      for (const auto out_dtype : {at::kFloat, at::kBFloat16}) {
        Tensor out = at::zeros({count}, out_dtype);
        CHECK_OK(zero::sum_parts(data, dtype, divisor, out));
        CHECK_TRUE(at::equal(out, want.to(out_dtype)));
      }
    }
  }
  CHECK_FAILS(
      zero::sum_parts({}, at::kInt, 1.0, at::zeros({1})), "cannot be summed");
}

}  // namespace
