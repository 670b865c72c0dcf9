#include "zero/absent_device.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/add.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/headeronly/version.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <queue>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace zero::absent_device {
namespace {

using at::ScalarType;
using at::Tensor;
using torch::autograd::Edge;
using torch::autograd::Node;

// Whether a kernel takes these numbers of heads. Since 2.14 the efficient one,
// too, shares those of keys among those of queries.
template <bool kFlash>
bool heads_fit(const sdp::sdp_params& given) {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
  return sdp::check_batch_size_and_num_heads_dense<true, true, true>(
      given, false);
#else
  return sdp::check_batch_size_and_num_heads_dense<kFlash>(given, false);
#endif
}

bool of_dtypes(
    const sdp::sdp_params& given, std::initializer_list<ScalarType> dtypes) {
  return sdp::check_tensor_dtype(given, std::vector<ScalarType>(dtypes), false);
}

bool multiple_of(const c10::SymInt& size, int64_t unit) {
  return size > 0 && size % unit == 0;
}

bool flash_takes(const sdp::sdp_params& given) {
  const auto width = given.query.sym_size(-1);
  return sdp::check_runtime_disabled_flash(given, false) &&
      sdp::check_for_attn_mask(given, false) &&
      width == given.key.sym_size(-1) && width == given.value.sym_size(-1) &&
      width <= 256 &&
      !(given.is_causal && given.query.sym_size(-2) != given.key.sym_size(-2)) &&
      of_dtypes(given, {at::kHalf, at::kBFloat16}) &&
      heads_fit<true>(given) && sdp::check_nonzero_sequence_lengths_dense(given, false) &&
      sdp::check_last_dim_stride_equals_1_dense<true>(given, false);
}

bool efficient_takes(const sdp::sdp_params& given) {
  // Rows of 16 bytes.
  const int64_t unit = given.query.scalar_type() == at::kFloat ? 4 : 8;
  const auto width = given.query.sym_size(-1);
  return sdp::check_runtime_disabled_mem_efficient(given, false) &&
      width == given.key.sym_size(-1) && multiple_of(width, unit) &&
      multiple_of(given.value.sym_size(-1), unit) &&
      of_dtypes(given, {at::kHalf, at::kBFloat16, at::kFloat}) &&
      heads_fit<false>(given) && sdp::check_nonzero_sequence_lengths_dense(given, false) &&
      sdp::check_last_dim_stride_equals_1_dense<false>(given, false);
}

// The kernel of attention that torch takes on a device of compute capability
// 8.0 or later. Where such a device prefers cuDNN's, flash stands for it: both
// keep the result and one sum a row.
int64_t chosen_attention(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const std::optional<Tensor>& mask,
    double dropout,
    bool is_causal,
    std::optional<double> /*scale*/,
    bool shares_heads) {
  const sdp::sdp_params given{
      query, key, value, mask, dropout, is_causal, shares_heads};
  auto chosen = sdp::SDPBackend::math;
  if (sdp::check_nested_tensor(given, false) &&
      sdp::check_tensor_shapes(given, false)) {
    chosen = flash_takes(given) ? sdp::SDPBackend::flash_attention
        : efficient_takes(given) ? sdp::SDPBackend::efficient_attention
                                 : sdp::SDPBackend::math;
  }
  return static_cast<int64_t>(chosen);
}

// The nodes between outputs and inputs, and what each waits for.
class Backward {
 public:
  Backward(const std::vector<Edge>& roots, const std::vector<Edge>& ends) {
    for (size_t i = 0; i < ends.size(); ++i) {
      if (ends[i].function) {
        wanted_[ends[i].function.get()].push_back({ends[i].input_nr, i});
      }
    }
    results_.resize(ends.size());
    for (const Edge& root : roots) {
      find_needed(root.function.get());
    }
    for (Node* node : needed_) {
      for (const Edge& next : node->next_edges()) {
        if (is_needed(next)) {
          ++awaited_[next.function.get()];
        }
      }
    }
  }

  std::vector<Tensor> run(
      const std::vector<Edge>& roots, std::vector<Tensor> grads) {
    for (size_t i = 0; i < roots.size(); ++i) {
      if (is_needed(roots[i])) {
        add(roots[i], std::move(grads[i]));
      }
    }
    for (const Edge& root : roots) {
      if (is_needed(root)) {
        make_ready(root.function.get());
      }
    }
    while (!ready_.empty()) {
      Node* node = ready_.top();
      ready_.pop();
      run_node(*node);
    }
    return std::move(results_);
  }

 private:
  struct Wanted {
    uint32_t input;
    size_t result;
  };
  struct Later {
    bool operator()(const Node* a, const Node* b) const {
      return a->sequence_nr() < b->sequence_nr();
    }
  };

  bool is_needed(const Edge& edge) const {
    return edge.function && needed_.count(edge.function.get()) != 0;
  }

  // Depth first, without recursion: a graph may be deeper than the stack.
  void find_needed(Node* root) {
    struct Visit {
      Node* node;
      size_t next;
    };
    if (root == nullptr || !seen_.insert(root).second) {
      return;
    }
    std::vector<Visit> path{{root, 0}};
    while (!path.empty()) {
      Node* node = path.back().node;
      if (path.back().next < node->next_edges().size()) {
        Node* next =
            node->next_edges()[path.back().next++].function.get();
        if (next != nullptr && seen_.insert(next).second) {
          path.push_back({next, 0});
        }
        continue;
      }
      path.pop_back();
      bool needed = wanted_.count(node) != 0;
      for (const Edge& next : node->next_edges()) {
        needed = needed || is_needed(next);
      }
      if (needed) {
        needed_.insert(node);
      }
    }
  }

  void add(const Edge& to, Tensor grad) {
    auto& into = inputs_[to.function.get()];
    into.resize(to.function->num_inputs());
    if (!grad.defined()) {
      return;
    }
    auto& sum = into[to.input_nr];
    sum = sum.defined() ? at::add(sum, grad) : std::move(grad);
  }

  void make_ready(Node* node) {
    if (awaited_[node] == 0 && queued_.insert(node).second) {
      ready_.push(node);
    }
  }

  void run_node(Node& node) {
    auto inputs = std::move(inputs_[&node]);
    inputs.resize(node.num_inputs());
    for (const auto& hook : node.tensor_pre_hooks()) {
      inputs = (*hook)(inputs);
    }
    if (const auto found = wanted_.find(&node); found != wanted_.end()) {
      for (const Wanted& wanted : found->second) {
        results_[wanted.result] = inputs[wanted.input];
      }
    }
    bool goes_on = false;
    for (const Edge& next : node.next_edges()) {
      goes_on = goes_on || is_needed(next);
    }
    if (!goes_on) {
      return;
    }
    for (const auto& hook : node.pre_hooks()) {
      inputs = (*hook)(inputs);
    }
    const bool hooked = !node.post_hooks().empty();
    const auto given = hooked ? inputs : std::vector<Tensor>{};
    auto outputs = node(std::move(inputs));
    torch::autograd::validate_outputs(
        node.next_edges(), outputs, [&](const std::string& message) {
          return "Function " + node.name() + " returned an " + message;
        });
    for (const auto& hook : node.post_hooks()) {
      outputs = (*hook)(outputs, given);
    }
    for (size_t i = 0; i < node.next_edges().size(); ++i) {
      const Edge& next = node.next_edges()[i];
      if (is_needed(next)) {
        add(next, i < outputs.size() ? std::move(outputs[i]) : Tensor());
        --awaited_[next.function.get()];
        make_ready(next.function.get());
      }
    }
  }

  std::unordered_map<const Node*, std::vector<Wanted>> wanted_;
  std::unordered_set<const Node*> seen_;
  std::unordered_set<Node*> needed_;
  std::unordered_set<const Node*> queued_;
  std::unordered_map<const Node*, int64_t> awaited_;
  std::unordered_map<const Node*, std::vector<Tensor>> inputs_;
  std::priority_queue<Node*, std::vector<Node*>, Later> ready_;
  std::vector<Tensor> results_;
};

}  // namespace

void stand_in() {
  using c10::DeviceType;
  if (!c10::impl::hasDeviceGuardImpl(DeviceType::CUDA)) {
    // It stays as long as the process: the registry does not own it.
    c10::impl::registerDeviceGuard(
        DeviceType::CUDA,
        new c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA>());
  }
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&chosen_attention);
}

std::vector<Tensor> gradients(
    const std::vector<Tensor>& outputs,
    const std::vector<Tensor>& inputs,
    std::vector<Tensor> grad_outputs) {
  TORCH_CHECK(
      outputs.size() == grad_outputs.size(),
      outputs.size(), " outputs have ", grad_outputs.size(), " gradients");
  std::vector<Edge> roots, ends;
  for (size_t i = 0; i < outputs.size(); ++i) {
    TORCH_CHECK(
        outputs[i].requires_grad(),
        "output ", i, " of the forward has no gradient");
    roots.push_back(torch::autograd::impl::gradient_edge(outputs[i]));
  }
  for (const Tensor& input : inputs) {
    TORCH_CHECK(
        input.requires_grad(), "an input of the forward has no gradient");
    ends.push_back(torch::autograd::impl::gradient_edge(input));
  }
  const at::AutoGradMode no_second_gradients(false);
  torch::autograd::validate_outputs(
      roots, grad_outputs, [](const std::string& message) { return message; });
  return Backward(roots, ends).run(roots, std::move(grad_outputs));
}

}  // namespace zero::absent_device
