// What a plan for a CUDA device asks of torch on a machine that has none: fake
// tensors of that device run forward through torch's own code once it has
// something to ask about devices and attention, and backward through
// gradients(). Nothing here computes: there are no values, and no device.
//
// torch's own engine of autograd cannot be used there: it asks the driver for
// the streams of the device that gradients are on, and refuses where there is
// no driver or, on a build without CUDA, nothing to ask.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace zero::absent_device {

// Let torch take fake tensors of CUDA: a guard that guards nothing where this
// build has none, and the choice of the kernel of attention that a device of
// compute capability 8.0 or later makes. No effect the second time. Only for a
// process that has no CUDA device.
void stand_in();

// What `torch.autograd.grad(outputs, inputs, grad_outputs, allow_unused=True)`
// gives, in the order in which torch's engine does it, with its hooks; each
// node runs in the calling thread. An undefined tensor stands for a gradient
// that is not there. What nodes have saved is kept.
std::vector<at::Tensor> gradients(
    const std::vector<at::Tensor>& outputs,
    const std::vector<at::Tensor>& inputs,
    std::vector<at::Tensor> grad_outputs);

}  // namespace zero::absent_device
