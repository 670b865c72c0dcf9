// Python bindings: zero_compiler.runtime._C. The only place where a failed
// Status becomes an exception.

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "zero/absent_device.h"
#include "zero/alloc_meter.h"
#include "zero/c10d_transport.h"
#include "zero/compiled_for.h"
#include "zero/cpu_allocator.h"
#include "zero/engine.h"
#include "zero/hosts_transport.h"
#include "zero/shared_segment.h"
#include "zero/shared_transport.h"
#include "zero/status.h"
#include "zero/transport.h"

namespace {

using zero::Engine;

// The Python class is looked up when it is needed: the extension can be used
// (and tested) without the package around it.
[[noreturn]] void raise(const std::string& message) {
  py::object type =
      py::reinterpret_borrow<py::object>(PyExc_RuntimeError);
  try {
    type = py::module_::import("zero_compiler.errors").attr("TransferError");
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_ImportError) &&
        !error.matches(PyExc_AttributeError)) {
      throw;
    }
  }
  py::set_error(type, message.c_str());
  throw py::error_already_set();
}

void check(const zero::Status& status) {
  if (!status.ok()) {
    // A signal that arrived in a wait: what its handler raised says more.
    if (PyErr_Occurred() != nullptr) {
      throw py::error_already_set();
    }
    raise(status.message());
  }
}

// Whether a signal handler raised something; it stays set until check().
bool interrupted() {
  const py::gil_scoped_acquire acquire;
  return PyErr_CheckSignals() != 0;
}

template <typename T>
T unwrap(zero::Result<T> result) {
  check(result.status());
  return std::move(result.value());
}

// Runs `body` without the GIL. Every call into the engine goes through here: it
// may block for a peer, even a copy is long enough for other Python threads to
// want the GIL, and whoever holds the engine's lock may need the GIL to drop a
// tensor.
template <typename Body>
auto without_gil(Body&& body) {
  const py::gil_scoped_release release;
  return std::forward<Body>(body)();
}

// Destroying an engine can destroy a process group, whose threads may want the
// GIL to finish.
struct DestroyWithoutGil {
  void operator()(Engine* engine) const {
    const py::gil_scoped_release release;
    delete engine;
  }
};

// (file descriptor, bytes of a space, process of each rank, seconds to wait,
// bytes that are this rank's at rest)
using SegmentOfRanks =
    std::tuple<int, int64_t, std::vector<int64_t>, double, int64_t>;

// (process group of the ranks with the same place on each host, None where there
// is one host, this rank's place, segment of this host's ranks)
using RanksOfHosts = std::tuple<py::object, int, SegmentOfRanks>;

std::unique_ptr<zero::Transport> over_group(
    const py::object& group,
    int rank,
    int world,
    uint32_t series) {
  // Through the raw pointer: torch registers the class with a holder type of
  // its own.
  auto* raw = group.cast<::c10d::ProcessGroup*>();
  if (raw->getSize() != world || raw->getRank() != rank) {
    raise(
        "the process group has rank " + std::to_string(raw->getRank()) +
        " of " + std::to_string(raw->getSize()) + ", not " +
        std::to_string(rank) + " of " + std::to_string(world));
  }
  return zero::make_c10d_transport(
      c10::intrusive_ptr<::c10d::ProcessGroup>::reclaim_copy(raw), series);
}

std::unique_ptr<zero::Transport> over_segment(
    std::unique_ptr<zero::Transport> inner,
    const SegmentOfRanks& shared,
    int rank,
    std::function<bool()> asks) {
  const auto& [fd, space_bytes, pids, seconds, rest_bytes] = shared;
  zero::SharedOptions options{
      .rank = rank,
      .pids = {},
      .timeout = std::chrono::duration_cast<std::chrono::milliseconds>(
          std::chrono::duration<double>(seconds)),
      .rest_bytes = rest_bytes,
      .interrupted = std::move(asks)};
  for (const int64_t pid : pids) {
    options.pids.push_back(static_cast<pid_t>(pid));
  }
  return unwrap(zero::make_shared_transport(
      std::move(inner),
      unwrap(zero::SharedSegment::open(fd, space_bytes)),
      std::move(options)));
}

std::unique_ptr<Engine, DestroyWithoutGil> make_engine(
    const py::object& group,
    int rank,
    int world,
    bool scribble_on_release,
    uint32_t series,
    const std::optional<SegmentOfRanks>& shared,
    const std::optional<RanksOfHosts>& hosts) {
  std::unique_ptr<zero::Transport> transport;
  if (hosts) {
    const auto& [across, place, segment] = *hosts;
    const int places = static_cast<int>(std::get<2>(segment).size());
    if (shared || places < 1 || world % places != 0 || rank % places != place) {
      raise(
          "place " + std::to_string(place) + " of " + std::to_string(places) +
          " on a host is not that of rank " + std::to_string(rank) + " of " +
          std::to_string(world));
    }
    std::unique_ptr<zero::Transport> between;
    if (!across.is_none()) {
      between = over_group(across, rank / places, world / places, series);
    } else if (places == world) {
      between = std::make_unique<zero::LocalTransport>();
    } else {
      raise("several hosts need a process group");
    }
    transport = zero::make_hosts_transport(
        std::move(between),
        over_segment(nullptr, segment, place, {}),  // its waits are a thread's
        {.rank = rank,
         .world = world,
         .local_world = places,
         .interrupted = interrupted});
  } else if (group.is_none()) {
    if (world != 1 || rank != 0) {
      raise("an engine without a process group has rank 0 of 1");
    }
    transport = std::make_unique<zero::LocalTransport>();
  } else {
    transport = over_group(group, rank, world, series);
  }
  if (shared && world > 1) {
    if (static_cast<int>(std::get<2>(*shared).size()) != world) {
      raise("a shared segment needs the process of each rank");
    }
    transport = over_segment(std::move(transport), *shared, rank, interrupted);
  }
  return std::unique_ptr<Engine, DestroyWithoutGil>(new Engine(
      std::move(transport),
      rank,
      world,
      {.scribble_on_release = scribble_on_release}));
}

int add_gather(
    Engine& engine,
    int arena,
    at::ScalarType dtype,
    std::string label,
    const std::vector<
        std::tuple<int64_t, std::vector<int64_t>, int64_t>>& params,
    int64_t staging_offset,
    int staging_arena,
    const std::optional<at::ScalarType>& wire) {
  zero::GatherSpec spec{
      .arena = arena,
      .dtype = dtype,
      .label = std::move(label),
      .params = {},
      .staging_offset = staging_offset,
      .staging_arena = staging_arena,
      .wire = wire.value_or(at::ScalarType::Undefined)};
  for (const auto& [chunk_numel, sizes, out_offset] : params) {
    spec.params.push_back({chunk_numel, sizes, out_offset});
  }
  return unwrap(
      without_gil([&] { return engine.add_gather(std::move(spec)); }));
}

int add_reduce(
    Engine& engine,
    int arena,
    at::ScalarType dtype,
    std::string label,
    const std::vector<std::tuple<int64_t, std::vector<int64_t>>>& params,
    int64_t staging_offset,
    bool replicated,
    at::ScalarType out_dtype,
    double divisor,
    bool passes,
    const std::optional<at::ScalarType>& wire) {
  zero::ReduceSpec spec{
      .arena = arena,
      .dtype = dtype,
      .label = std::move(label),
      .params = {},
      .staging_offset = staging_offset,
      .replicated = replicated,
      .out_dtype = out_dtype,
      .divisor = divisor,
      .passes = passes,
      .wire = wire.value_or(at::ScalarType::Undefined)};
  for (const auto& [chunk_numel, sizes] : params) {
    spec.params.push_back({chunk_numel, sizes});
  }
  return unwrap(
      without_gil([&] { return engine.add_reduce(std::move(spec)); }));
}

zero::PeerMemory::Space space_called(const std::string& name) {
  using Space = zero::PeerMemory::Space;
  if (name == "slots") {
    return Space::kSlots;
  }
  if (name == "kept") {
    return Space::kKept;
  }
  if (name == "own") {
    return Space::kOwn;
  }
  raise("no space of shared memory is called '" + name + "'");
}

py::dict counters(const Engine& engine) {
  const zero::Counters now = without_gil([&] { return engine.counters(); });
  py::dict all;
  all["gathers"] = now.gathers;
  all["reduces"] = now.reduces;
  all["bytes_gathered"] = now.bytes_gathered;
  all["bytes_reduced"] = now.bytes_reduced;
  all["arena_bytes"] = now.arena_bytes;
  all["arena_bytes_planned"] = now.arena_bytes_planned;
  all["shared_bytes"] = now.shared_bytes;
  all["scratch_bytes"] = now.scratch_bytes;
  all["allocations"] = now.allocations;
  all["arena_allocations"] = now.arena_allocations;
  all["recycled"] = now.recycled;
  return all;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The zero_compiler runtime engine.";

  py::class_<zero::Arena, std::shared_ptr<zero::Arena>>(
      module, "Arena", "A block of memory, allocated when an engine first uses it")
      .def(
          py::init<int64_t, at::Device>(), py::arg("nbytes"),
          py::arg("device"))
      .def_property_readonly("nbytes", &zero::Arena::nbytes);
  py::class_<Engine, std::unique_ptr<Engine, DestroyWithoutGil>>(
      module, "Engine")
      .def(
          py::init(&make_engine),
          py::arg("group"),
          py::arg("rank"),
          py::arg("world"),
          py::kw_only(),
          py::arg("scribble_on_release") = false,
          py::arg("series") = 0,
          py::arg("shared") = std::nullopt,
          py::arg("hosts") = std::nullopt)
      .def(
          "add_shared_arena",
          [](Engine& engine, int64_t nbytes, const std::string& space) {
            const auto which = space_called(space);
            return unwrap(without_gil(
                [&] { return engine.add_shared_arena(nbytes, which); }));
          },
          py::arg("nbytes"),
          py::arg("space"))
      .def(
          "leave",
          [](Engine& engine) {
            check(without_gil([&] { return engine.leave(); }));
          })
      .def(
          "add_arena",
          [](Engine& engine, int64_t nbytes, const at::Device& device) {
            return unwrap(without_gil(
                [&] { return engine.add_arena(nbytes, device); }));
          },
          py::arg("nbytes"),
          py::arg("device"))
      .def(
          "add_gather",
          &add_gather,
          py::arg("arena"),
          py::arg("dtype"),
          py::arg("label"),
          py::arg("params"),
          py::arg("staging_offset"),
          py::arg("staging_arena") = -1,
          py::arg("wire") = std::nullopt)
      .def(
          "grow_arena",
          [](Engine& engine, int arena, int64_t nbytes) {
            return unwrap(without_gil(
                [&] { return engine.grow_arena(arena, nbytes); }));
          },
          py::arg("arena"),
          py::arg("nbytes"))
      .def(
          "place_arena",
          [](Engine& engine, int id, std::shared_ptr<zero::Arena> arena) {
            check(without_gil(
                [&] { return engine.place_arena(id, std::move(arena)); }));
          },
          py::arg("arena"),
          py::arg("to"))
      .def(
          "abandon",
          [](Engine& engine, const std::string& reason) {
            without_gil([&] { engine.abandon(reason); });
          },
          py::arg("reason"))
      .def(
          "stop_waiting",
          [](Engine& engine, const std::string& reason) {
            without_gil([&] { engine.stop_waiting(reason); });
          },
          py::arg("reason"))
      .def(
          "gather_start",
          [](Engine& engine, int id, std::vector<at::Tensor> shards) {
            check(without_gil(
                [&] { return engine.gather_start(id, std::move(shards)); }));
          },
          py::arg("gather"),
          py::arg("shards"))
      .def(
          "gather_wait",
          [](Engine& engine, int id) {
            return unwrap(without_gil([&] { return engine.gather_wait(id); }));
          },
          py::arg("gather"))
      .def(
          "trim",
          [](Engine& engine, int64_t nbytes) {
            without_gil([&] { engine.trim(nbytes); });
          },
          py::arg("nbytes"))
      .def(
          "release",
          [](Engine& engine, int id) {
            check(without_gil([&] { return engine.release(id); }));
          },
          py::arg("gather"))
      .def(
          "add_reduce",
          &add_reduce,
          py::arg("arena"),
          py::arg("dtype"),
          py::arg("label"),
          py::arg("params"),
          py::arg("staging_offset"),
          py::arg("replicated"),
          py::arg("out_dtype"),
          py::arg("divisor"),
          py::arg("passes") = false,
          py::arg("wire") = std::nullopt)
      .def(
          "reduce_start",
          [](Engine& engine, int id, std::vector<at::Tensor> grads) {
            check(without_gil(
                [&] { return engine.reduce_start(id, std::move(grads)); }));
          },
          py::arg("reduce"),
          py::arg("grads"))
      .def(
          "reduce_wait",
          [](Engine& engine, int id) {
            return unwrap(without_gil([&] { return engine.reduce_wait(id); }));
          },
          py::arg("reduce"))
      .def(
          "expect_output",
          [](Engine& engine,
             int64_t nbytes,
             const at::Device& device,
             bool passes) {
            check(without_gil(
                [&] { return engine.expect_output(nbytes, device, passes); }));
          },
          py::arg("nbytes"),
          py::arg("device"),
          py::arg("passes"))
      .def(
          "acquire_output",
          [](Engine& engine,
             int64_t numel,
             c10::ScalarType dtype,
             const at::Device& device,
             bool passes) {
            return unwrap(without_gil([&] {
              return engine.acquire_output(numel, dtype, device, passes);
            }));
          },
          py::arg("numel"),
          py::arg("dtype"),
          py::arg("device"),
          py::arg("passes"))
      .def("counters", &counters)
      .def("close", [](Engine& engine) {
        without_gil([&] { engine.close(); });
      });

  module.def("install_cpu_allocator", &zero::install_cpu_allocator);
  module.def("cpu_allocator_is_installed", &zero::cpu_allocator_is_installed);
  module.def("stand_in_for_cuda", &zero::absent_device::stand_in);
  module.def(
      "gradients_without_engine",
      &zero::absent_device::gradients,
      py::arg("outputs"),
      py::arg("inputs"),
      py::arg("grad_outputs"));
  module.def("meter_install", &zero::meter::install);
  module.def("meter_uninstall", &zero::meter::uninstall);
  module.def("meter_current", &zero::meter::current);
  module.def("meter_peak", &zero::meter::peak);
  module.def("meter_reset_peak", &zero::meter::reset_peak);
}
