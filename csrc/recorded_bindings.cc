// A replay of a recorded graph reads and writes where the recording did. So what a segment is given has to lie where it
// lay then, and what it returns is made anew as tensors over memory that is the graph's. How many of those are left
// tells whether a replay would write over a value that somebody still holds.
#include "recorded_bindings.h"

#include <ATen/ops/from_blob.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "python_objects.h"

namespace zero {
namespace {

// The owner of the memory, as Python has it. The last tensor over it may go in any thread.
class Owner {
 public:
  explicit Owner(py::object object) : object_(std::move(object)) {}
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;
  ~Owner() {
    if (Py_IsInitialized() == 0) {
      object_.release();  // the process ends, and its memory with it
      return;
    }
    const py::gil_scoped_acquire gil;
    object_ = py::object();
  }

 private:
  py::object object_;
};

// Counts tensors over memory of one owner, which lives as long as any of them.
class Held {
 public:
  explicit Held(py::object owner)
      : owner_(std::make_shared<Owner>(std::move(owner))),
        count_(std::make_shared<std::atomic<int64_t>>(0)) {}

  int64_t count() const {
    return count_->load();
  }

  // What a tensor over the memory calls at its end.
  auto deleter() const {
    count_->fetch_add(1);
    return [owner = owner_, count = count_](void*) mutable {
      count->fetch_sub(1);
      owner.reset();
    };
  }

 private:
  std::shared_ptr<Owner> owner_;
  std::shared_ptr<std::atomic<int64_t>> count_;
};

uintptr_t address(const at::Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
}

// Where each of `values` lies; 0 of what is no tensor.
std::vector<uintptr_t> addresses(const py::list& values) {
  std::vector<uintptr_t> found;
  found.reserve(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const py::object value = item(values, i);
    found.push_back(THPVariable_Check(value.ptr()) ? address(tensor_in(value)) : 0);
  }
  return found;
}

// One result of a segment: in memory of the graph, or, with `input`, in that of what it is given.
struct Result {
  uintptr_t address = 0;
  int64_t input = -1;
  int64_t offset = 0;  // elements, behind the begin of the input
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  at::TensorOptions options;
};

// What a recorded segment was given and has returned.
class RecordedValues {
 public:
  RecordedValues(std::shared_ptr<Held> held, const py::list& given, const py::sequence& made)
      : held_(std::move(held)), given_(addresses(given)) {
    results_.reserve(made.size());
    for (size_t i = 0; i < made.size(); ++i) {
      const py::object value = item(made, i);
      results_.push_back(value.is_none() ? std::nullopt : std::optional(result(given, tensor_in(value))));
    }
  }

  // Whether each of these lies where the recording found it.
  bool lie_there(const py::list& given) const {
    if (given.size() != given_.size()) {
      return false;
    }
    for (size_t i = 0; i < given_.size(); ++i) {
      const py::object value = item(given, i);
      if (given_[i] != (THPVariable_Check(value.ptr()) ? address(tensor_in(value)) : 0)) {
        return false;
      }
    }
    return true;
  }

  // The results of a replay.
  py::list make(const py::list& given) const {
    py::list made;  // grows: what torch calls meanwhile may look at every object, and finds none without a value
    for (const auto& result : results_) {
      if (!result) {
        made.append(py::none());
        continue;
      }
      made.append(owned(THPVariable_Wrap(result->input < 0 ? over(*result) : within(*result, given))));
    }
    return made;
  }

 private:
  static Result result(const py::list& given, const at::Tensor& made) {
    Result out{address(made), -1, 0, made.sizes().vec(), made.strides().vec(), made.options()};
    const void* storage = made.storage().data();
    for (size_t i = 0; storage != nullptr && i < given.size(); ++i) {
      const py::object value = item(given, i);
      if (!THPVariable_Check(value.ptr()) || tensor_in(value).storage().data() != storage) {
        continue;
      }
      const at::Tensor& input = tensor_in(value);
      TORCH_CHECK_VALUE(
          input.dtype() == made.dtype(), "it returns a view of what it is given, in another dtype");
      out.input = static_cast<int64_t>(i);
      out.offset = made.storage_offset() - input.storage_offset();
      break;
    }
    return out;
  }

  at::Tensor over(const Result& result) const {
    if (result.address == 0) {
      return at::empty_strided(result.sizes, result.strides, result.options);  // it has no elements
    }
    return at::for_blob(reinterpret_cast<void*>(result.address), result.sizes)  // NOLINT
        .strides(result.strides)
        .deleter(held_->deleter())
        .options(result.options)
        .target_device(result.options.device())
        .make_tensor();
  }

  static at::Tensor within(const Result& result, const py::list& given) {
    const py::object value = item(given, static_cast<size_t>(result.input));
    const at::Tensor& input = tensor_in(value);
    return input.as_strided(result.sizes, result.strides, input.storage_offset() + result.offset);
  }

  std::shared_ptr<Held> held_;
  std::vector<uintptr_t> given_;
  std::vector<std::optional<Result>> results_;
};

}  // namespace

void bind_recorded(py::module_& module) {
  py::class_<Held, std::shared_ptr<Held>>(module, "Held")
      .def(py::init<py::object>(), py::arg("owner"))
      .def("count", &Held::count);
  py::class_<RecordedValues>(module, "RecordedValues")
      .def(
          py::init<std::shared_ptr<Held>, const py::list&, const py::sequence&>(),
          py::arg("held"),
          py::arg("given"),
          py::arg("made"))
      .def("lie_there", &RecordedValues::lie_there, py::arg("given"))
      .def("make", &RecordedValues::make, py::arg("given"));
  module.def("addresses", &addresses, py::arg("values"));
}

}  // namespace zero
