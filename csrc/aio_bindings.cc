// Python bindings of file I/O: zero_compiler.storage._aio. Addresses and sizes
// only: zero_compiler/storage/aio.py knows tensors, keeps them alive, and makes exceptions out
// of failures.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "zero/aio/engine.h"
#include "zero/aio/storage.h"
#include "zero/status.h"

namespace py = pybind11;

namespace {

using zero::Result;
using zero::Status;
using zero::aio::Engine;
using zero::aio::File;
using zero::aio::FilePtr;
using zero::aio::Request;
using zero::aio::RequestPtr;

// A wait looks this often for signals, so that Ctrl-C ends it.
constexpr int kLookMilliseconds = 50;

void check(const Status& status) {
  if (!status.ok()) {
    const py::object type = py::module_::import("zero_compiler.errors").attr("StorageError");
    py::set_error(type, type(status.message(), py::arg("errno") = status.code()));
    throw py::error_already_set();
  }
}

template <typename T>
T unwrap(Result<T> result) {
  check(result.status());
  return std::move(result.value());
}

template <typename Body>
auto without_gil(Body&& body) {
  const py::gil_scoped_release release;
  return std::forward<Body>(body)();
}

struct DestroyWithoutGil {
  void operator()(Engine* engine) const {
    const py::gil_scoped_release release;
    delete engine;
  }
};

// `step` waits at most so many milliseconds and returns whether it is over.
template <typename Step>
bool wait_for(std::optional<double> seconds, Step step) {
  double left = seconds.value_or(0) * 1000;
  for (;;) {
    const int now = seconds && left < kLookMilliseconds ? static_cast<int>(left) : kLookMilliseconds;
    if (unwrap(without_gil([&] { return step(now); }))) {
      return true;
    }
    if (PyErr_CheckSignals() != 0) {
      throw py::error_already_set();
    }
    left -= now;
    if (seconds && left < 1) {
      return false;
    }
  }
}

std::unique_ptr<Engine, DestroyWithoutGil> make_engine(
    const std::string& backend, int64_t block_bytes, int depth) {
  auto storage = backend == "uring" ? zero::aio::make_uring_storage(depth)
                                    : zero::aio::make_thread_storage(depth);
  auto engine = Engine::create(
      unwrap(std::move(storage)), {.block_bytes = block_bytes, .depth = depth});
  return std::unique_ptr<Engine, DestroyWithoutGil>(unwrap(std::move(engine)).release());
}

py::dict counters(const Engine& engine) {
  const auto now = engine.counters();
  py::dict all;
  all["reads"] = now.reads;
  all["writes"] = now.writes;
  all["bytes_read"] = now.bytes_read;
  all["bytes_written"] = now.bytes_written;
  all["bytes_cached"] = now.bytes_cached;
  all["short_transfers"] = now.short_transfers;
  all["in_flight"] = now.in_flight;
  return all;
}

// NOLINTNEXTLINE: addresses come from Python as integers.
char* at(uintptr_t address) {
  return reinterpret_cast<char*>(address);
}

// What a range of a profile is held by (csrc/torch_bindings.cc), or None.
std::shared_ptr<void> held_by(const py::object& held) {
  return held.is_none()
      ? nullptr
      : *static_cast<std::shared_ptr<void>*>(PyCapsule_GetPointer(held.ptr(), "zero.held"));
}

}  // namespace

PYBIND11_MODULE(_aio, module) {
  module.doc() = "File I/O of zero_compiler: see zero_compiler.storage.aio.";
  module.attr("ALIGN") = zero::aio::kAlign;
  module.attr("DEFAULT_BLOCK_BYTES") = zero::aio::Options().block_bytes;
  module.attr("DEFAULT_DEPTH") = zero::aio::Options().depth;

  py::class_<File, FilePtr>(module, "File")
      .def_property_readonly("direct", &File::direct)
      .def_property_readonly("writable", &File::writable);

  py::class_<Request, RequestPtr>(module, "Request")
      .def_property_readonly("done", &Request::done)
      .def_property_readonly("begin_ns", &Request::begin_ns)
      .def_property_readonly("end_ns", &Request::end_ns)
      .def(
          "wait",
          [](Request& request, std::optional<double> seconds) {
            return request.done() ||
                wait_for(seconds, [&](int now) { return request.wait(now); });
          },
          py::arg("seconds"))
      .def("failure", [](Request& request) -> std::optional<std::tuple<std::string, int>> {
        const auto failure = request.failure();
        if (failure == nullptr) {
          return std::nullopt;
        }
        return std::make_tuple(failure->status.message(), failure->status.code());
      });

  py::class_<Engine, std::unique_ptr<Engine, DestroyWithoutGil>>(module, "Engine")
      .def(py::init(&make_engine), py::arg("backend"), py::arg("block_bytes"), py::arg("depth"))
      .def(
          "open",
          [](Engine& engine, const std::string& path, int64_t nbytes, bool create, bool direct, std::string label, std::string name) {
            return unwrap(without_gil([&] {
              return engine.open(
                  path,
                  nbytes,
                  {.create = create,
                   .direct = direct,
                   .label = std::move(label),
                   .name = std::move(name)});
            }));
          },
          py::arg("path"),
          py::arg("nbytes"),
          py::arg("create"),
          py::arg("direct"),
          py::arg("label"),
          py::arg("name"))
      .def(
          "close_file",
          [](Engine& engine, const FilePtr& file) {
            check(without_gil([&] { return engine.close_file(file); }));
          })
      .def(
          "submit",
          // Sets `_core` of the Python object that holds the memory: no signal
          // comes between a request that begins and somebody who knows of it.
          [](Engine& engine, const py::object& request, bool write, FilePtr file, uintptr_t address, int64_t size, int64_t offset, std::string label, const py::object& held) {
            auto until_done = held_by(held);
            request.attr("_core") = unwrap(without_gil([&] {
              return write
                  ? engine.write(std::move(file), at(address), size, offset, std::move(label), std::move(until_done))
                  : engine.read(std::move(file), at(address), size, offset, std::move(label), std::move(until_done));
            }));
          })
      .def("settle", [](Engine& engine) { check(without_gil([&] { return engine.settle(); })); })
      .def(
          "sync",
          [](Engine& engine, const FilePtr& file) {
            (void)wait_for(std::nullopt, [&](int now) { return engine.writes_done(file, now); });
            check(without_gil([&] { return engine.sync(file); }));
          })
      .def(
          "register_memory",
          [](Engine& engine, uintptr_t address, int64_t size) {
            return unwrap(without_gil([&] { return engine.register_memory(at(address), size); }));
          })
      .def(
          "forget_memory",
          [](Engine& engine, uintptr_t address, int64_t size) {
            check(without_gil([&] { return engine.forget_memory(at(address), size); }));
          })
      .def("counters", &counters)
      .def("close", [](Engine& engine) { without_gil([&] { engine.close(); }); });

  // Why io_uring cannot be used here, or None.
  module.def("uring_refusal", []() -> std::optional<std::string> {
    const auto storage = without_gil([] { return zero::aio::make_uring_storage(1); });
    if (storage.ok()) {
      return std::nullopt;
    }
    return storage.status().message();
  });
}
