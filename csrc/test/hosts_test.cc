// Ranks of several hosts, as threads: one segment a host, and one fake group of
// ranks with the same place on each.

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_transport.h"
#include "ranks.h"
#include "zero/hosts_transport.h"
#include "zero/shared_segment.h"
#include "zero/shared_transport.h"

namespace {

using at::Tensor;
using std::chrono::milliseconds;
using zero::SharedSegment;
using zero::Transport;
using zero::test::FakeTransport;
using zero::test::Hub;
using zero::test::value_of;

struct Job {
  int hosts;
  int places;
  std::vector<std::shared_ptr<Hub>> hubs;  // one a place
};
using Body = std::function<void(Transport&, int rank, Job&)>;

void on_hosts(int hosts, int places, const Body& body) {
  Job job{.hosts = hosts, .places = places, .hubs = {}};
  std::vector<std::shared_ptr<SharedSegment>> segments;
  for (int place = 0; place < places; ++place) {
    job.hubs.push_back(std::make_shared<Hub>(hosts));
  }
  for (int host = 0; host < hosts; ++host) {
    segments.push_back(value_of(SharedSegment::create(int64_t{1} << 30)));
  }
  const std::vector<pid_t> pids(static_cast<size_t>(places), ::getpid());
  zero::test::on_ranks(hosts * places, [&](int rank) {
    const auto host = static_cast<size_t>(rank / places);
    const int place = rank % places;
    auto inside = value_of(zero::make_shared_transport(
        nullptr, segments[host],
        {.rank = place,
         .pids = pids,
         .timeout = std::chrono::seconds(20),
         .rest_bytes = 0,
         .interrupted = {}}));
    auto across = std::make_unique<FakeTransport>(
        job.hubs[static_cast<size_t>(place)], rank / places);
    const auto transport = zero::make_hosts_transport(
        std::move(across), std::move(inside),
        {.rank = rank,
         .world = hosts * places,
         .local_world = places,
         .interrupted = {}});
    body(*transport, rank, job);
  });
}

Tensor numbers(int64_t first, int64_t count) {
  return at::arange(first, first + count).to(at::kFloat);
}

// All three collectives in flight at once, of sizes that grow and shrink, waited
// for in another order.
void steps(Transport& transport, int rank, int world, int late) {
  for (int step = 0; step < 12; ++step) {
    if (rank == late && step % 3 == 0) {
      std::this_thread::sleep_for(milliseconds(3));
    }
    const int64_t n = 1 + (step * 37) % 101;
    const Tensor full = at::empty({world * n}, at::kFloat);
    const Tensor mine = numbers(1000 * rank + step, n);
    auto gather = value_of(transport.start_all_gather(mine, full));
    const Tensor grads = numbers(rank, world * n);
    const Tensor rows = at::empty({n}, at::kFloat);
    auto scatter = value_of(transport.start_reduce_scatter(grads, rows));
    const Tensor same = numbers(rank + step, n);
    auto reduce = value_of(transport.start_all_reduce(same));
    CHECK_OK(reduce->wait());
    CHECK_OK(gather->wait());
    CHECK_OK(scatter->wait());
    const double ranks = world * (world - 1) / 2.0;
    for (int k = 0; k < world; ++k) {
      CHECK_TRUE(
          at::equal(full.narrow(0, k * n, n), numbers(1000 * k + step, n)));
    }
    CHECK_TRUE(at::equal(grads, numbers(rank, world * n)));
    CHECK_TRUE(
        at::equal(rows, numbers(rank * n, n).mul(world).add(ranks)));
    CHECK_TRUE(at::equal(same, numbers(step, n).mul(world).add(ranks)));
  }
}

TEST(hosts_agree_whoever_is_late) {
  const std::vector<std::pair<int, int>> shapes = {{2, 2}, {2, 3}, {3, 2}};
  for (const auto& [hosts, places] : shapes) {
    const int world = hosts * places;
    for (const int late : {-1, 0, world - 1}) {
      on_hosts(hosts, places, [&](Transport& transport, int rank, Job&) {
        steps(transport, rank, world, late);
      });
    }
  }
}

TEST(hosts_bytes_travel_whatever_they_mean) {
  on_hosts(2, 2, [](Transport& transport, int rank, Job&) {
    const Tensor mine = numbers(rank, 8).to(at::kBool);
    const Tensor full = at::empty({32}, at::kBool);
    CHECK_OK(value_of(transport.start_all_gather(mine, full))->wait());
    CHECK_TRUE(at::equal(full.narrow(0, 0, 8), numbers(0, 8).to(at::kBool)));
    CHECK_TRUE(at::equal(full.narrow(0, 24, 8), numbers(3, 8).to(at::kBool)));
  });
}

// Of two parts, with more and less than a block. This host's sum is exact; of each
// other host's a number is off by at most 1/254 of the largest of its block.
TEST(hosts_sums_in_blocks_are_within_their_bound) {
  const std::vector<std::pair<int, int>> shapes = {{2, 2}, {3, 2}};
  for (const auto& [hosts, places] : shapes) {
    const int world = hosts * places;
    const int64_t n = 600;
    on_hosts(hosts, places, [&](Transport& transport, int rank, Job&) {
      const Tensor grads = numbers(rank, world * n);
      const Tensor rows = at::empty({n}, at::kFloat);
      CHECK_OK(value_of(transport.start_packed_reduce_scatter(
                   grads, rows, at::kChar, {{500, 500}, {100, 100}}))
                   ->wait());
      const double ranks = world * (world - 1) / 2.0;
      const Tensor want = numbers(rank * n, n).mul(world).add(ranks);
      const double largest = (rank + 1.0) * static_cast<double>(n) + world;
      const double bound = (hosts - 1) * places * largest / 254;
      const auto off = rows.sub(want).abs().max().item<float>();
      CHECK_TRUE(off > 0 && off <= bound);
    });
  }
}

// A host that is gone is seen across; the rank that sees it tells its own host.
TEST(hosts_that_are_gone_end_the_others_with_the_reason) {
  on_hosts(2, 2, [](Transport& transport, int rank, Job& job) {
    if (rank >= 2) {
      job.hubs[static_cast<size_t>(rank % 2)]->kill(1);
      return;
    }
    const Tensor full = at::empty({32}, at::kFloat);
    for (int attempt = 0; attempt < 2; ++attempt) {
      const auto status =
          value_of(transport.start_all_gather(numbers(rank, 8), full))->wait();
      CHECK_TRUE(!status.ok());
      CHECK_TRUE(
          status.message().find("closed by peer 1") != std::string::npos);
    }
  });
}

// Its caller broke off: the ranks of its host, which wait for it in a transfer,
// end at once, and not with the time of the group.
TEST(hosts_ranks_that_give_up_tell_their_host) {
  on_hosts(1, 3, [](Transport& transport, int rank, Job&) {
    if (rank == 1) {
      std::this_thread::sleep_for(milliseconds(20));
      transport.give_up("Stop: no more");
      return;
    }
    const auto began = std::chrono::steady_clock::now();
    const Tensor same = numbers(rank, 8);
    const auto status = value_of(transport.start_all_reduce(same))->wait();
    CHECK_TRUE(!status.ok());
    CHECK_TRUE(
        status.message().find("gave up before a reduction: Stop: no more") !=
        std::string::npos);
    CHECK_TRUE(
        std::chrono::steady_clock::now() - began < std::chrono::seconds(5));
  });
}

}  // namespace
