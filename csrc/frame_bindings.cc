// What a call of a compiled frame does for every parameter and every value. In Python each takes some tenths
// of a microsecond, which is longer than small layers compute. Nothing is decided here: each function says
// what it does to its lists.
#include "frame_bindings.h"

#include <torch/csrc/autograd/graph_task.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "python_objects.h"

namespace zero {
namespace {

using Numbers = std::vector<Py_ssize_t>;

py::list take(const py::list& values, const Numbers& numbers) {
  py::list taken(numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i) {
    const Py_ssize_t at = numbers[i];
    if (at < 0 || at >= PyList_GET_SIZE(values.ptr())) {
      throw py::index_error(c10::str("there is no value ", at));
    }
    PyObject* value = PyList_GET_ITEM(values.ptr(), at);
    Py_INCREF(value);
    PyList_SET_ITEM(taken.ptr(), static_cast<Py_ssize_t>(i), value);
  }
  return taken;
}

// What stood at this number is destroyed when the value stands there.
void set(const py::list& values, Py_ssize_t at, py::object value) {
  if (PyList_SetItem(values.ptr(), at, value.release().ptr()) != 0) {  // it takes the reference in any case
    throw py::error_already_set();
  }
}

void put(const py::list& values, const Numbers& numbers, const py::sequence& given) {
  if (given.size() != numbers.size()) {
    throw py::value_error(c10::str(given.size(), " values for ", numbers.size(), " places"));
  }
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (numbers[i] >= 0) {  // else nobody reads it
      set(values, numbers[i], item(given, i));
    }
  }
}

void drop(const py::list& values, const Numbers& numbers) {
  for (const Py_ssize_t at : numbers) {
    set(values, at, py::none());
  }
}

// Some of the values of a Program, by their numbers in the list that has all of them.
class Values {
 public:
  explicit Values(Numbers numbers) : numbers_(std::move(numbers)) {}

  py::list take_from(const py::list& values) const {
    return take(values, numbers_);
  }
  void put_into(const py::list& values, const py::sequence& given) const {
    put(values, numbers_, given);
  }
  void drop_from(const py::list& values) const {
    drop(values, numbers_);
  }

 private:
  Numbers numbers_;
};

// A segment with what it reads, makes and is the last to read. It is made before the Program that calls it and
// refers to nothing of that: so no circle of references leads through here, where Python's collector sees none.
class SegmentCall {
 public:
  SegmentCall(py::function segment, Numbers ins, Numbers outs, Numbers free)
      : segment_(std::move(segment)),
        ins_(std::move(ins)),
        outs_(std::move(outs)),
        free_(std::move(free)) {}

  void operator()(const py::list& values) const {
    const py::list args = take(values, ins_);  // which the segment empties
    drop(values, free_);
    const py::object made = owned(PyObject_CallOneArg(segment_.ptr(), args.ptr()));
    put(values, outs_, made.cast<py::sequence>());
  }

 private:
  py::function segment_;
  Numbers ins_;
  Numbers outs_;
  Numbers free_;
};

// Whether `param` stands at `place`, which is (module, attribute).
bool stands(py::handle place, py::handle param) {
  static PyObject* const parameters = lasting("_parameters");
  const auto there = py::cast<py::tuple>(place);
  const py::object module = item(there, 0), name = item(there, 1);
  const py::object all = attribute(module, parameters);
  return entry(all, name) == param.ptr();
}

// Whether each parameter has its local tensor still, that has its address, and the parameter stands in all of
// its places. Each of `chunks` is (parameter, local tensor, address, places).
bool all_stand(const py::list& chunks) {
  static PyObject* const local_tensor = lasting("_local_tensor");
  for (size_t i = 0; i < chunks.size(); ++i) {
    const py::object chunk = item(chunks, i);
    const py::object param = item(chunk, 0), local = item(chunk, 1);
    const auto address = item(chunk, 2).cast<uintptr_t>();
    if (!attribute(param, local_tensor).is(local) ||
        reinterpret_cast<uintptr_t>(tensor_in(local).const_data_ptr()) != address) {
      return false;
    }
    const py::object places = item(chunk, 3);
    for (size_t k = 0; k < py::len(places); ++k) {
      if (!stands(item(places, k), param)) {
        return false;
      }
    }
  }
  return true;
}

// How often each of some tensors had been written to.
class Versions {
 public:
  explicit Versions(const py::tuple& tensors) {
    versions_.reserve(tensors.size());
    for (const py::handle tensor : tensors) {
      versions_.push_back(tensor_in(tensor)._version());
    }
  }

  // The first of the same tensors that was written to since, or stands in none of its places any more, each
  // (module, attribute); -1: none.
  int64_t first_changed(const py::tuple& tensors, const py::list& places) const {
    if (tensors.size() != versions_.size() || places.size() != versions_.size()) {
      throw py::value_error(
          c10::str(tensors.size(), " tensors and ", places.size(), " places, not ", versions_.size()));
    }
    for (size_t i = 0; i < versions_.size(); ++i) {
      const py::handle tensor = PyTuple_GET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(i));
      if (!stands_in_one(item(places, i), tensor) || tensor_in(tensor)._version() != versions_[i]) {
        return static_cast<int64_t>(i);
      }
    }
    return -1;
  }

  int64_t of(size_t at) const {
    return versions_.at(at);
  }

 private:
  static bool stands_in_one(const py::object& places, py::handle tensor) {
    for (size_t k = 0; k < py::len(places); ++k) {
      if (stands(item(places, k), tensor)) {
        return true;
      }
    }
    return false;
  }

  std::vector<int64_t> versions_;
};

// Aliases of the local tensors of DTensors, on which a write counts as one on the DTensor; and those of them
// whose DTensor requires no gradient. Those of inference mode count nothing.
py::tuple local_rows(const py::tuple& params) {
  static PyObject* const local_tensor = lasting("_local_tensor");
  py::list rows;  // grows: what torch calls meanwhile may look at every object, and finds none without a value
  py::list frozen;
  for (size_t i = 0; i < params.size(); ++i) {
    const py::handle object = PyTuple_GET_ITEM(params.ptr(), static_cast<Py_ssize_t>(i));
    const at::Tensor& param = tensor_in(object);
    const py::object local = attribute(object, local_tensor);
    const at::Tensor row = tensor_in(local).detach();
    if (!row.is_inference() && !param.is_inference()) {
      row.unsafeGetTensorImpl()->set_version_counter(param.unsafeGetTensorImpl()->version_counter());
    }
    const py::object wrapped = owned(THPVariable_Wrap(row));
    if (!param.requires_grad()) {
      frozen.append(wrapped);
    }
    rows.append(wrapped);
  }
  return py::make_tuple(py::tuple(rows), std::move(frozen));
}

// This rank's rows of some chunks, which they are the beginning of: of each their shape and strides.
class Rows {
 public:
  using Form = std::pair<std::vector<int64_t>, std::vector<int64_t>>;

  explicit Rows(std::vector<Form> forms) : forms_(std::move(forms)) {}

  py::list of(const py::sequence& chunks) const {
    if (chunks.size() != forms_.size()) {
      throw py::value_error(c10::str(chunks.size(), " chunks, not ", forms_.size()));
    }
    py::list rows;  // grows, as in `local_rows`
    for (size_t i = 0; i < forms_.size(); ++i) {
      const auto& [shape, strides] = forms_[i];
      py::object rest = item(chunks, i);
      const at::Tensor& chunk = tensor_in(rest);
      if (chunk.sizes() != at::IntArrayRef(shape)) {
        rest = owned(THPVariable_Wrap(chunk.as_strided(shape, strides)));
      }
      rows.append(rest);
    }
    return rows;
  }

 private:
  std::vector<Form> forms_;
};

bool all_contiguous(const py::list& tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensor_in(item(tensors, i)).is_contiguous()) {
      return false;
    }
  }
  return true;
}

// Whether the backward that runs in this thread comes to all nodes behind the one that runs now: it was given no
// inputs. False where none runs.
bool backward_runs_all() {
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  return chosen != nullptr && chosen->empty();
}

// Set the gradient of each DTensor to the DTensor of its spec with the local tensor that is given for it. Returns
// the numbers of those that are left out though something is given for them: they have a gradient or a hook, or
// require none.
py::list set_gradients(const py::tuple& params, const py::tuple& given, const py::object& dtensor) {
  static PyObject* const spec = lasting("_spec");
  static PyObject* const grad = lasting("grad");
  static PyObject* const hooks = lasting("_backward_hooks");
  static PyObject* const later_hooks = lasting("_post_accumulate_grad_hooks");
  static PyObject* const make_name = lasting("__new__");
  if (params.size() != given.size()) {
    throw py::value_error(c10::str(given.size(), " gradients for ", params.size(), " parameters"));
  }
  const py::object make = attribute(dtensor, make_name);
  const py::tuple names = py::make_tuple("requires_grad");
  py::list left;
  for (size_t i = 0; i < params.size(); ++i) {
    const py::handle object = PyTuple_GET_ITEM(params.ptr(), static_cast<Py_ssize_t>(i));
    const py::handle local = PyTuple_GET_ITEM(given.ptr(), static_cast<Py_ssize_t>(i));
    if (local.is_none()) {
      continue;
    }
    const at::Tensor& param = tensor_in(object);
    if (!param.requires_grad() || !attribute(object, grad).is_none() || !attribute(object, hooks).is_none() ||
        !attribute(object, later_hooks).is_none()) {
      left.append(i);
      continue;
    }
    const py::object of = attribute(object, spec);
    PyObject* const args[] = {dtensor.ptr(), local.ptr(), of.ptr(), Py_False};
    const py::object made = owned(PyObject_Vectorcall(make.ptr(), args, 3, names.ptr()));
    if (PyObject_SetAttr(object.ptr(), grad, made.ptr()) != 0) {  // torch's own setter: it checks the form
      throw py::error_already_set();
    }
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
