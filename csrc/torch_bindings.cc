// Python bindings of what torch's C++ interface has and its Python has not:
// zero_compiler._torch_cpp. zero_compiler/ranges.py says how ranges are used.

#include <c10/core/CPUAllocator.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "frame_bindings.h"
#include "optimizer_bindings.h"
#include "recorded_bindings.h"
#include "zero/compiled_for.h"
#include "zero/lane.h"
#include "zero/range.h"

namespace py = pybind11;

namespace {

using zero::Lane;
using zero::Range;

struct DestroyWithoutGil {
  void operator()(Lane* lane) const {
    const py::gil_scoped_release release;
    delete lane;
  }
};

// A context of Python. It begins when it is entered.
class Context {
 public:
  Context(const std::string& lane, const std::string& what) : name_(zero::name_on(lane, what)) {}

  void enter() {
    range_.emplace(std::move(name_));
  }
  void exit() {
    range_.reset();
  }

 private:
  std::string name_;
  std::optional<Range> range_;
};

// For whoever moves the bytes: a pointer to a shared_ptr<void>, of which it takes
// a copy. None where nothing is recorded.
py::object begin(Lane& lane, const std::string& what) {
  std::shared_ptr<void> held;
  {
    const py::gil_scoped_release release;
    held = lane.begin(what);
  }
  if (held == nullptr) {
    return py::none();
  }
  return py::capsule(
      new std::shared_ptr<void>(std::move(held)), "zero.held", [](PyObject* capsule) {
        delete static_cast<std::shared_ptr<void>*>(PyCapsule_GetPointer(capsule, "zero.held"));
      });
}

// From here on a write to a tensor is counted as one to its partner in `of` too, and
// autograd, which has saved one of them, notices that the other was written to.
// Those of inference mode count nothing.
void share_version_counters(
    const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& of) {
  TORCH_CHECK(tensors.size() == of.size(), tensors.size(), " tensors, and ", of.size());
  for (size_t i = 0; i < of.size(); ++i) {
    if (!tensors[i].is_inference() && !of[i].is_inference()) {
      tensors[i].unsafeGetTensorImpl()->set_version_counter(
          of[i].unsafeGetTensorImpl()->version_counter());
    }
  }
}

// Give the storage of a tensor of the CPU, where others than this tensor hold it too,
// other memory with a copy of what it has: all of them, views of every kind, see that
// from here on, and the memory that they saw before is nobody's. False where nobody
// else holds it, and nothing was done.
bool move_if_shared(const at::Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  TORCH_CHECK(storage.device().is_cpu(), "a storage on ", storage.device());
  if (storage.use_count() == 1) {
    return false;
  }
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  c10::DataPtr copy = c10::GetCPUAllocator()->allocate(impl->nbytes());
  std::memcpy(copy.get(), impl->data(), impl->nbytes());
  impl->set_data_ptr_noswap(std::move(copy));
  return true;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "What torch's Python has not: see zero_compiler.torch_cpp.";

  module.def("name_on", &zero::name_on, py::arg("lane"), py::arg("what"));
  module.def("profiled", &zero::profiled);
  module.def(
      "share_version_counters", &share_version_counters, py::arg("tensors"), py::arg("of"));
  module.def("move_if_shared", &move_if_shared, py::arg("tensor"));
  py::class_<Context>(module, "Range")
      .def(py::init<const std::string&, const std::string&>(), py::arg("lane"), py::arg("what"))
      .def("__enter__", &Context::enter)
      .def("__exit__", [](Context& context, const py::args&) { context.exit(); });
  py::class_<Lane, std::unique_ptr<Lane, DestroyWithoutGil>>(module, "Lane")
      .def(py::init<std::string>(), py::arg("name"))
      .def("begin", &begin, py::arg("what"))
      .def("settle", [](Lane& lane) {
        const py::gil_scoped_release release;
        lane.settle();
      });
  zero::bind_frames(module);
  zero::bind_optimizers(module);
  zero::bind_recorded(module);
}
