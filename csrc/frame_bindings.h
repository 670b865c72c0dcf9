// What a call of a compiled frame does for every parameter and every value, each as one call for all of them.
#pragma once

#include <pybind11/pybind11.h>

namespace zero {

void bind_frames(pybind11::module_& module);

}  // namespace zero
