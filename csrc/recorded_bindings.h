// Values of segments that were recorded into a graph of the device: tensors at the addresses to which a replay writes.
#pragma once

#include <pybind11/pybind11.h>

namespace zero {

void bind_recorded(pybind11::module_& module);

}  // namespace zero
