// What a step of an optimizer asks of every parameter, each as one call for all of them.
#pragma once

#include <pybind11/pybind11.h>

namespace zero {

void bind_optimizers(pybind11::module_& module);

}  // namespace zero
