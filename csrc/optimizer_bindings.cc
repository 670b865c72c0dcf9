#include "optimizer_bindings.h"

#include <cstdint>
#include <vector>

#include "python_objects.h"

namespace zero {
namespace {

py::object own_attributes(py::handle object) {
  static PyObject* const name = lasting("__dict__");
  return attribute(object, name);
}

bool is_a(py::handle object, const py::type& type) {
  return PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(type.ptr())) != 0;
}

bool equal(py::handle one, py::handle other) {
  const int found = PyObject_RichCompareBool(one.ptr(), other.ptr(), Py_EQ);  // the same object is equal
  if (found < 0) {
    throw py::error_already_set();
  }
  return found == 1;
}

// Whether one of the tensors among `params` has an attribute of its own that has one of these names.
bool some_have(const py::sequence& params, const py::tuple& names) {
  for (size_t i = 0; i < params.size(); ++i) {
    const py::object param = item(params, i);
    if (!THPVariable_Check(param.ptr())) {
      continue;  // an optimizer of somebody else's may hold what it likes
    }
    const py::object own = own_attributes(param);
    for (const py::handle name : names) {
      if (entry(own, name) != nullptr) {
        return true;
      }
    }
  }
  return false;
}

// Whether one of the DTensors among `params` has an address, or another storage than its attribute `own` says,
// which is (its id, the storage). A copy has the attribute with another id.
bool some_have_another_storage(const py::sequence& params, const py::str& own, const py::type& dtensor) {
  for (size_t i = 0; i < params.size(); ++i) {
    const py::object param = item(params, i);
    if (!is_a(param, dtensor)) {
      continue;
    }
    const c10::StorageImpl* storage = tensor_in(param).storage().unsafeGetStorageImpl();
    if (storage->data() != nullptr) {
      return true;
    }
    const py::object all = own_attributes(param);
    PyObject* said = entry(all, own);
    if (said == nullptr) {
      continue;
    }
    const auto [id, known] = py::cast<std::pair<uintptr_t, uintptr_t>>(py::handle(said));
    if (id == reinterpret_cast<uintptr_t>(param.ptr()) && known != reinterpret_cast<uintptr_t>(storage)) {
      return true;
    }
  }
  return false;
}

// Count a write to each DTensor among `tensors` that has the attribute `managed`, as autograd does; those of
// inference mode count nothing. Returns the DTensors that do not have it.
py::list count_written(const py::sequence& tensors, const py::str& managed, const py::type& dtensor) {
  py::list others;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const py::object object = item(tensors, i);
    if (!is_a(object, dtensor)) {
      continue;
    }
    const py::object own = own_attributes(object);
    if (entry(own, managed) == nullptr) {
      others.append(object);
      continue;
    }
    const at::Tensor& tensor = tensor_in(object);
    if (!tensor.is_inference()) {
      tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
  return others;
}

// This rank's rows of a tensor: where it is a DTensor its local tensor, and its spec, else null.
struct Rows {
  Rows(py::object tensor, const py::type& dtensor) {
    static PyObject* const spec_name = lasting("_spec");
    static PyObject* const local_tensor = lasting("_local_tensor");
    if (Py_TYPE(tensor.ptr()) == reinterpret_cast<PyTypeObject*>(dtensor.ptr())) {
      spec = attribute(tensor, spec_name);
      rows = attribute(tensor, local_tensor);
    } else {
      rows = std::move(tensor);
    }
  }

  bool lie_as(const Rows& other) const {
    static PyObject* const mesh = lasting("mesh");
    static PyObject* const placements = lasting("placements");
    if (!spec.is(other.spec)) {
      if (!spec || !other.spec || !equal(attribute(spec, mesh), attribute(other.spec, mesh)) ||
          !equal(attribute(spec, placements), attribute(other.spec, placements))) {
        return false;
      }
    }
    return tensor_in(rows).sym_sizes() == tensor_in(other.rows).sym_sizes();
  }

  py::object spec;
  py::object rows;
};

// This rank's rows of the tensors of each list. None where those of a list do not lie as those of the first; but a
// list of numbers, plain tensors of no dimension, and an empty one may be any beside it.
py::object rows_alike(const py::sequence& lists, const py::type& dtensor) {
  py::list out;
  std::vector<Rows> first;
  for (size_t k = 0; k < lists.size(); ++k) {
    const py::object tensors = item(lists, k);
    const size_t size = py::len(tensors);
    bool alike = k == 0 || size == first.size(), numbers = true;
    py::list rows;
    for (size_t i = 0; i < size; ++i) {
      py::object tensor = item(tensors, i);
      numbers = numbers && !is_a(tensor, dtensor) && tensor_in(tensor).dim() == 0;
      Rows found(std::move(tensor), dtensor);
      rows.append(found.rows);
      if (k == 0) {
        first.push_back(std::move(found));
      } else {
        alike = alike && found.lie_as(first[i]);
      }
    }
    if (!alike && !numbers) {
      return py::none();
    }
    out.append(rows);
  }
  return out;
}

}  // namespace

void bind_optimizers(py::module_& module) {
  module.def("some_have", &some_have, py::arg("params"), py::arg("names"));
  module.def(
      "some_have_another_storage",
      &some_have_another_storage,
      py::arg("params"),
      py::arg("own"),
      py::arg("dtensor"));
  module.def(
      "count_written", &count_written, py::arg("tensors"), py::arg("managed"), py::arg("dtensor"));
  module.def("rows_alike", &rows_alike, py::arg("lists"), py::arg("dtensor"));
}

}  // namespace zero
