#include "optimizer_bindings.h"

#include <cstdint>
#include <vector>

#include "python_objects.h"

namespace zero {
namespace {

PyObject* local_tensor() {
  static PyObject* const name = lasting("_local_tensor");
  return name;
}

// Whether one of `params` has an attribute of its own that is called as one of `names`.
bool some_have(const py::list& params, const py::tuple& names) {
  for (const py::handle param : params) {
    const py::object own = owned(PyObject_GenericGetDict(param.ptr(), nullptr));
    for (const py::handle name : names) {
      if (item(own.ptr(), name.ptr()) != nullptr) {
        return true;
      }
    }
  }
  return false;
}

// The first DTensor among `params` that has an address, or another storage than its attribute `own`
// says, which is (its id, the storage); -1: none. A copy has the attribute with another id.
int64_t first_with_other_storage(const py::list& params, const py::str& own, const py::object& dtensor) {
  int64_t at = -1;
  for (const py::handle param : params) {
    ++at;
    if (!PyObject_TypeCheck(param.ptr(), reinterpret_cast<PyTypeObject*>(dtensor.ptr()))) {
      continue;
    }
    const c10::StorageImpl* storage = tensor_in(param.ptr()).storage().unsafeGetStorageImpl();
    if (storage->data() != nullptr) {
      return at;
    }
    const py::object all = owned(PyObject_GenericGetDict(param.ptr(), nullptr));
    PyObject* said = item(all.ptr(), own.ptr());
    if (said != nullptr && PyLong_AsVoidPtr(PyTuple_GetItem(said, 0)) == param.ptr() &&
        PyLong_AsVoidPtr(PyTuple_GetItem(said, 1)) != storage) {
      return at;
    }
  }
  return -1;
}

// This rank's rows of the parameters of an optimizer and of what its state has of them, as lists.
//
// They are of the tensors that there were when this was made, of which someone else has found that the
// tensors of a parameter lie alike.
class OptimizerRows {
 public:
  // `states` has the dictionary of each parameter, and `keys` say what to take of it.
  OptimizerRows(const py::list& params, py::list states, py::tuple keys)
      : params_(owned(PyList_GetSlice(params.ptr(), 0, PyList_GET_SIZE(params.ptr())))),
        states_(std::move(states)),
        keys_(std::move(keys)) {
    for (const py::handle param : params_) {
      rows_.append(attribute(param.ptr(), local_tensor()));
    }
    for (const py::handle key : keys_) {
      py::list values;
      py::list rows;
      for (const py::handle state : states_) {
        PyObject* value = item(state.ptr(), key.ptr());
        TORCH_CHECK_VALUE(value != nullptr, "a state has no such key");
        values.append(py::reinterpret_borrow<py::object>(value));
        rows.append(
            PyObject_HasAttr(value, local_tensor()) != 0 ? attribute(value, local_tensor())
                                                         : py::reinterpret_borrow<py::object>(value));
      }
      values_.append(values);
      state_rows_.append(rows);
    }
  }

  // Whether these are still the parameters, and what stands in `state` for them.
  bool hold(const py::list& params, const py::dict& state) const {
    if (params.size() != params_.size()) {
      return false;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params.ptr()); ++i) {
      PyObject* param = PyList_GET_ITEM(params.ptr(), i);
      PyObject* own = PyList_GET_ITEM(states_.ptr(), i);
      if (param != PyList_GET_ITEM(params_.ptr(), i) || item(state.ptr(), param) != own ||
          attribute(param, local_tensor()).ptr() != PyList_GET_ITEM(rows_.ptr(), i)) {
        return false;
      }
      for (size_t k = 0; k < keys_.size(); ++k) {
        PyObject* values = PyList_GET_ITEM(values_.ptr(), static_cast<Py_ssize_t>(k));
        if (item(own, keys_[k].ptr()) != PyList_GET_ITEM(values, i)) {
          return false;
        }
      }
    }
    return true;
  }

  // The same rows of all gradients; None where one is not there, or does not lie as its parameter.
  py::object gradients() const {
    static PyObject* const spec = lasting("_spec");
    py::list out(params_.size());
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params_.ptr()); ++i) {
      PyObject* param = PyList_GET_ITEM(params_.ptr(), i);
      const at::Tensor& grad = tensor_in(param).grad();
      if (!grad.defined()) {
        return py::none();
      }
      const py::object wrapped = owned(THPVariable_Wrap(grad));
      if (Py_TYPE(wrapped.ptr()) != Py_TYPE(param) ||
          !attribute(wrapped.ptr(), spec).is(attribute(param, spec))) {
        return py::none();
      }
      const py::object local = attribute(wrapped.ptr(), local_tensor());
      const at::Tensor& rows = tensor_in(local.ptr());
      const at::Tensor& like = tensor_in(PyList_GET_ITEM(rows_.ptr(), i));
      if (rows.sizes() != like.sizes() || rows.scalar_type() != like.scalar_type() ||
          rows.device() != like.device() || rows.layout() != like.layout() || !rows.is_contiguous()) {
        return py::none();
      }
      out[static_cast<size_t>(i)] = local;
    }
    return out;
  }

  // A kernel has written to the rows: so autograd counts a write to each parameter.
  void count_written() const {
    for (const py::handle param : params_) {
      const at::Tensor& tensor = tensor_in(param.ptr());
      if (!tensor.is_inference()) {
        tensor.unsafeGetTensorImpl()->bump_version();
      }
    }
  }

  py::list rows() const {
    return rows_;
  }
  py::list states() const {
    return state_rows_;
  }

 private:
  py::list params_;
  py::list states_;
  py::tuple keys_;
  py::list values_;  // of each key, what the states have under it
  py::list rows_;
  py::list state_rows_;
};

// Add one to numbers on the CPU, each a float tensor of its own.
void count_steps(const py::list& steps) {
  for (const py::handle step : steps) {
    const at::Tensor& tensor = tensor_in(step.ptr());
    *tensor.mutable_data_ptr<float>() += 1.0F;
    tensor.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace

void bind_optimizers(py::module_& module) {
  module.def("some_have", &some_have, py::arg("params"), py::arg("names"));
  module.def(
      "first_with_other_storage",
      &first_with_other_storage,
      py::arg("params"),
      py::arg("own"),
      py::arg("dtensor"));
  module.def("count_steps", &count_steps, py::arg("steps"));
  py::class_<OptimizerRows>(module, "OptimizerRows")
      .def(
          py::init<const py::list&, py::list, py::tuple>(),
          py::arg("params"),
          py::arg("states"),
          py::arg("keys"))
      .def("hold", &OptimizerRows::hold, py::arg("params"), py::arg("state"))
      .def("gradients", &OptimizerRows::gradients)
      .def("count_written", &OptimizerRows::count_written)
      .def_property_readonly("rows", &OptimizerRows::rows)
      .def_property_readonly("states", &OptimizerRows::states);
}

}  // namespace zero
