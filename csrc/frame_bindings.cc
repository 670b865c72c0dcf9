// Python does these things in some tenths of a microsecond a parameter, which is longer than small
// layers compute. Nothing is decided here: each function says what it does to its lists.
#include "frame_bindings.h"

#include <torch/csrc/autograd/graph_task.h>

#include <tuple>
#include <utility>
#include <vector>

#include "python_objects.h"

namespace zero {
namespace {

using Numbers = std::vector<Py_ssize_t>;

// Values of a Program in the list that has all of them, by number.
PyObject* value_at(const py::list& values, Py_ssize_t at) {
  TORCH_CHECK_INDEX(at >= 0 && at < PyList_GET_SIZE(values.ptr()), "there is no value ", at);
  return PyList_GET_ITEM(values.ptr(), at);
}

py::list take(const py::list& values, const Numbers& numbers) {
  py::list taken(numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i) {
    PyObject* value = value_at(values, numbers[i]);
    Py_INCREF(value);
    PyList_SET_ITEM(taken.ptr(), static_cast<Py_ssize_t>(i), value);
  }
  return taken;
}

void put(const py::list& values, const Numbers& numbers, const py::object& given) {
  const py::object fast = owned(PySequence_Fast(given.ptr(), "values come in a list or a tuple"));
  const auto size = static_cast<size_t>(PySequence_Fast_GET_SIZE(fast.ptr()));
  TORCH_CHECK_VALUE(size == numbers.size(), size, " values for ", numbers.size(), " places");
  for (size_t i = 0; i < size; ++i) {
    if (numbers[i] < 0) {
      continue;  // nobody reads it
    }
    value_at(values, numbers[i]);
    PyObject* value = PySequence_Fast_GET_ITEM(fast.ptr(), static_cast<Py_ssize_t>(i));
    Py_INCREF(value);
    PyList_SetItem(values.ptr(), numbers[i], value);
  }
}

void drop(const py::list& values, const Numbers& numbers) {
  for (const Py_ssize_t at : numbers) {
    value_at(values, at);
    Py_INCREF(Py_None);
    PyList_SetItem(values.ptr(), at, Py_None);
  }
}

// Some of the values of a Program.
class Values {
 public:
  explicit Values(Numbers numbers) : numbers_(std::move(numbers)) {}

  py::list take_from(const py::list& values) const {
    return take(values, numbers_);
  }
  void put_into(const py::list& values, const py::object& given) const {
    put(values, numbers_, given);
  }
  void drop_from(const py::list& values) const {
    drop(values, numbers_);
  }

 private:
  Numbers numbers_;
};

// A segment with what it reads, makes and is the last to read.
class SegmentCall {
 public:
  SegmentCall(py::function segment, Numbers ins, Numbers outs, Numbers free)
      : segment_(std::move(segment)), ins_(std::move(ins)), outs_(std::move(outs)), free_(std::move(free)) {}

  void operator()(const py::list& values) const {
    const py::list args = take(values, ins_);  // which the segment empties
    drop(values, free_);
    put(values, outs_, owned(PyObject_CallOneArg(segment_.ptr(), args.ptr())));
  }

 private:
  py::function segment_;
  Numbers ins_;
  Numbers outs_;
  Numbers free_;
};

bool stands(PyObject* module, PyObject* name, PyObject* param) {
  static PyObject* const parameters = lasting("_parameters");
  const py::object all = attribute(module, parameters);
  return item(all.ptr(), name) == param;
}

// Each of `chunks` is (parameter, its local tensor, the address of that, places), and each of the
// places (module, attribute). Whether all of that is still so.
bool all_stand(const py::list& chunks) {
  static PyObject* const local_tensor = lasting("_local_tensor");
  for (const py::handle chunk : chunks) {
    const auto [param, local, at, places] =
        py::reinterpret_borrow<py::tuple>(chunk).cast<std::tuple<py::object, py::object, int64_t, py::list>>();
    if (!attribute(param.ptr(), local_tensor).is(local) ||
        reinterpret_cast<int64_t>(tensor_in(local.ptr()).const_data_ptr()) != at) {
      return false;
    }
    for (const py::handle place : places) {
      if (!stands(PyTuple_GetItem(place.ptr(), 0), PyTuple_GetItem(place.ptr(), 1), param.ptr())) {
        return false;
      }
    }
  }
  return true;
}

// How often each of some tensors was written to.
class Versions {
 public:
  explicit Versions(const py::tuple& tensors) {
    versions_.reserve(tensors.size());
    for (const py::handle tensor : tensors) {
      versions_.push_back(tensor_in(tensor.ptr())._version());
    }
  }

  // The first of the same tensors that was written to since, or stands in none of its `places` any
  // more, each (module, attribute); -1: none.
  int64_t first_changed(const py::tuple& tensors, const py::list& places) const {
    TORCH_CHECK(tensors.size() == versions_.size() && places.size() == versions_.size());
    for (size_t i = 0; i < versions_.size(); ++i) {
      PyObject* tensor = PyTuple_GET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(i));
      bool found = false;
      for (const py::handle place : py::reinterpret_borrow<py::list>(places[i])) {
        found = stands(PyTuple_GetItem(place.ptr(), 0), PyTuple_GetItem(place.ptr(), 1), tensor);
        if (found) {
          break;
        }
      }
      if (!found || tensor_in(tensor)._version() != versions_[i]) {
        return static_cast<int64_t>(i);
      }
    }
    return -1;
  }

  int64_t of(size_t at) const {
    return versions_.at(at);
  }

 private:
  std::vector<int64_t> versions_;
};

// Aliases of the local tensors of DTensors, on which a write counts as one on the DTensor; and those of
// them whose DTensor requires no gradient. Those of inference mode count nothing.
py::tuple local_rows(const py::tuple& params) {
  static PyObject* const local_tensor = lasting("_local_tensor");
  py::tuple rows(params.size());
  py::list frozen;
  for (size_t i = 0; i < params.size(); ++i) {
    PyObject* const object = PyTuple_GET_ITEM(params.ptr(), static_cast<Py_ssize_t>(i));
    const at::Tensor& param = tensor_in(object);
    const py::object local = attribute(object, local_tensor);
    const at::Tensor row = tensor_in(local.ptr()).detach();
    if (!row.is_inference() && !param.is_inference()) {
      row.unsafeGetTensorImpl()->set_version_counter(param.unsafeGetTensorImpl()->version_counter());
    }
    const py::object wrapped = owned(THPVariable_Wrap(row));
    if (!param.requires_grad()) {
      frozen.append(wrapped);
    }
    rows[i] = wrapped;
  }
  return py::make_tuple(std::move(rows), std::move(frozen));
}

// Shape and strides of this rank's rows of some chunks, which they are the beginning of.
class Rows {
 public:
  using Form = std::pair<std::vector<int64_t>, std::vector<int64_t>>;

  explicit Rows(std::vector<Form> forms) : forms_(std::move(forms)) {}

  py::list of(const py::sequence& chunks) const {
    TORCH_CHECK_VALUE(chunks.size() == forms_.size(), chunks.size(), " chunks, not ", forms_.size());
    py::list rows(forms_.size());
    for (size_t i = 0; i < forms_.size(); ++i) {
      py::object chunk = chunks[i];
      const at::Tensor& tensor = tensor_in(chunk.ptr());
      const auto& [shape, strides] = forms_[i];
      rows[i] = tensor.sizes() == at::IntArrayRef(shape)
          ? std::move(chunk)
          : owned(THPVariable_Wrap(tensor.as_strided(shape, strides)));
    }
    return rows;
  }

 private:
  std::vector<Form> forms_;
};

// The local rows of the parameters of a frame, as long as these are the same and lie where they lay.
class FrameRows {
 public:
  explicit FrameRows(const py::tuple& params) : params_(params), rows_(local_rows(params)[0]) {
    for (const py::handle param : params) {
      specs_.append(attribute(param.ptr(), spec()));
      const py::object local = attribute(param.ptr(), local_tensor());
      at_.push_back(tensor_in(local.ptr()).const_data_ptr());
      locals_.append(local);
    }
  }

  bool hold(const py::tuple& params) const {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(params_.ptr()); ++i) {
      PyObject* param = PyTuple_GetItem(params.ptr(), i);
      if (param != PyTuple_GET_ITEM(params_.ptr(), i)) {
        return false;
      }
      const py::object local = attribute(param, local_tensor());
      if (local.ptr() != PyList_GET_ITEM(locals_.ptr(), i) ||
          attribute(param, spec()).ptr() != PyList_GET_ITEM(specs_.ptr(), i) ||
          tensor_in(local.ptr()).const_data_ptr() != at_[static_cast<size_t>(i)]) {
        return false;
      }
    }
    return true;
  }

  py::tuple rows() const {
    return rows_;
  }

 private:
  static PyObject* spec() {
    static PyObject* const name = lasting("_spec");
    return name;
  }
  static PyObject* local_tensor() {
    static PyObject* const name = lasting("_local_tensor");
    return name;
  }

  py::tuple params_;
  py::tuple rows_;
  py::list specs_;
  py::list locals_;
  std::vector<const void*> at_;
};

bool all_contiguous(const py::list& tensors) {
  for (const py::handle tensor : tensors) {
    if (!tensor_in(tensor.ptr()).is_contiguous()) {
      return false;
    }
  }
  return true;
}

// Whether the backward that runs comes to every node that is behind the one that runs now, as one
// does that was given no inputs.
bool backward_runs_all() {
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  return chosen != nullptr && chosen->empty();
}

// Set the gradient of each DTensor to the DTensor of its spec with the local tensor given for it. Left
// out are those that have a gradient or a hook, or require none; returned are the numbers of these, but
// of those alone that were given something.
py::list set_gradients(const py::tuple& params, const py::tuple& given, const py::object& dtensor) {
  static PyObject* const spec = lasting("_spec");
  static PyObject* const hooks = lasting("_backward_hooks");
  static PyObject* const later_hooks = lasting("_post_accumulate_grad_hooks");
  const py::tuple names = py::make_tuple("requires_grad");
  TORCH_CHECK(params.size() == given.size());
  const py::object make = attribute(dtensor.ptr(), lasting("__new__"));
  py::list left;
  for (size_t i = 0; i < params.size(); ++i) {
    PyObject* const object = PyTuple_GET_ITEM(params.ptr(), static_cast<Py_ssize_t>(i));
    PyObject* const local = PyTuple_GET_ITEM(given.ptr(), static_cast<Py_ssize_t>(i));
    if (local == Py_None) {
      continue;
    }
    const at::Tensor& param = tensor_in(object);
    if (!param.requires_grad() || param.grad().defined() || !attribute(object, hooks).is_none() ||
        !attribute(object, later_hooks).is_none()) {
      left.append(i);
      continue;
    }
    const py::object of = attribute(object, spec);
    PyObject* const args[] = {dtensor.ptr(), local, of.ptr(), Py_False};
    const py::object made = owned(PyObject_Vectorcall(make.ptr(), args, 3, names.ptr()));
    const at::Tensor& grad = tensor_in(made.ptr());
    if (grad.scalar_type() != param.scalar_type() || grad.device() != param.device() ||
        grad.sizes() != param.sizes()) {
      left.append(i);
      continue;
    }
    param.mutable_grad() = grad;
  }
  return left;
}

}  // namespace

void bind_frames(py::module_& module) {
  py::class_<Values>(module, "Values")
      .def(py::init<Numbers>(), py::arg("numbers"))
      .def("take", &Values::take_from, py::arg("values"))
      .def("put", &Values::put_into, py::arg("values"), py::arg("given"))
      .def("drop", &Values::drop_from, py::arg("values"));
  py::class_<SegmentCall>(module, "SegmentCall")
      .def(
          py::init<py::function, Numbers, Numbers, Numbers>(),
          py::arg("segment"),
          py::arg("ins"),
          py::arg("outs"),
          py::arg("free"))
      .def("__call__", &SegmentCall::operator(), py::arg("values"));
  py::class_<Versions>(module, "Versions")
      .def(py::init<const py::tuple&>(), py::arg("tensors"))
      .def("first_changed", &Versions::first_changed, py::arg("tensors"), py::arg("places"))
      .def("of", &Versions::of, py::arg("at"));
  py::class_<FrameRows>(module, "FrameRows")
      .def(py::init<const py::tuple&>(), py::arg("params"))
      .def("hold", &FrameRows::hold, py::arg("params"))
      .def_property_readonly("rows", &FrameRows::rows);
  py::class_<Rows>(module, "Rows")
      .def(py::init<std::vector<Rows::Form>>(), py::arg("forms"))
      .def("of", &Rows::of, py::arg("chunks"));
  module.def("all_stand", &all_stand, py::arg("chunks"));
  module.def("local_rows", &local_rows, py::arg("params"));
  module.def("all_contiguous", &all_contiguous, py::arg("tensors"));
  module.def("backward_runs_all", &backward_runs_all);
  module.def("set_gradients", &set_gradients, py::arg("params"), py::arg("given"), py::arg("dtensor"));
}

}  // namespace zero
