// The fallback: allocates what an operation will give, and queues the CPU's kernel on views of it.
#include "fallback.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "generator.h"
#include "shapes.h"

namespace sim {
namespace {

using torch::jit::Stack;
using Values = std::vector<c10::IValue>;

const c10::DispatchKeySet kCpu(c10::DispatchKey::CPU);

// One call: what it was given, and the stream that it goes to.
struct Call {
  const c10::OperatorHandle& op;
  const Signature& signature;
  Values arguments;
  c10::Device device;
  std::vector<Use> uses;

  Stream& stream() const { return current_stream(device.index()); }
};

// Kernels that index accept indices from the CPU.
bool takes_from_cpu(const std::string& name) {
  return name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index", 0) == 0;
}

c10::Device device_of(const Signature& signature, const Values& arguments) {
  c10::optional<c10::Device> device;
  for (const auto& argument : arguments) {
    visit(argument, [&](const at::Tensor& tensor) {
      if (is_ours(tensor) && !device) device = tensor.device();
    });
    if (!device && argument.isDevice() &&
        argument.toDevice().type() == c10::DeviceType::PrivateUse1)
      device = argument.toDevice();
  }
  TORCH_CHECK(device, signature.name, " was called on 'sim' without anything of it");
  if (!device->has_index()) device->set_index(static_cast<c10::DeviceIndex>(current_device()));
  return *device;
}

void check_device(const Call& call, const at::Tensor& tensor, bool is_written) {
  if (tensor.device() == call.device) return;
  const bool is_number = tensor.is_cpu() && tensor.dim() == 0;
  const bool is_index = tensor.is_cpu() && takes_from_cpu(call.signature.name);
  TORCH_CHECK((is_number || is_index) && !is_written,
              "Expected all tensors to be on the same device, but found at least two devices, ",
              call.device, " and ", tensor.device(), "! (when calling ", call.signature.name, ")");
}

c10::IValue generator_for(const Call& call, const c10::IValue& given) {
  if (!given.isGenerator()) return for_kernel(default_generator(call.device.index()));
  const auto generator = given.toGenerator();
  TORCH_CHECK(generator.device() == call.device, "Expected a '", call.device,
              "' device type for generator but found '", generator.device(), "'");
  return for_kernel(generator);
}

// A copy of a tensor of the CPU. A number of Python's stays one, which promotes no types.
at::Tensor copy_of(const at::Tensor& tensor) {
  auto copy = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

// The arguments for the CPU's kernel. Ours become views that own nothing, numbers become copies.
Values on_cpu(const Call& call) {
  Values values;
  for (size_t k = 0; k < call.arguments.size(); k++) {
    const auto& argument = call.arguments[k];
    if (static_cast<int>(k) == call.signature.generator)
      values.push_back(generator_for(call, argument));
    else if (argument.isDevice())
      values.push_back(c10::Device(at::kCPU));
    else
      values.push_back(with_tensors(argument, [](const at::Tensor& tensor) {
        return is_ours(tensor) ? on_host(tensor) : copy_of(tensor);
      }));
  }
  return values;
}

at::Tensor allocate(const Shape& shape, c10::Device device) {
  if (!shape.is_defined) return {};
  return at::empty_strided(shape.sizes, shape.strides,
                           at::TensorOptions(device).dtype(shape.type));
}

// Give what the CPU's kernel gave to the tensor that stands for it.
void fill(const at::Tensor& target, const at::Tensor& result) {
  if (!target.defined() || !result.defined()) return;
  // Meta kernels tell shapes of statistics that the CPU leaves out.
  if (result.numel() == 0 && target.numel() != 0) return;
  TORCH_CHECK(result.sizes() == target.sizes(), "Meta told ", target.sizes(), ", the CPU gave ",
              result.sizes());
  target.copy_(result);
}

using Pairs = std::vector<std::vector<at::Tensor>>;

void fill_all(const Pairs& targets, const Stack& results) {
  for (size_t k = 0; k < targets.size(); k++) {
    size_t i = 0;
    if (results[k].isTensor() && !targets[k].empty()) fill(targets[k][0], results[k].toTensor());
    if (!results[k].isList()) continue;
    for (const auto& item : results[k].toListRef()) fill(targets[k].at(i++), item.toTensor());
  }
}

c10::IValue as_value(const Outcome& outcome, const std::vector<at::Tensor>& tensors) {
  if (!outcome.is_list) return tensors[0];
  return c10::IValue(c10::List<at::Tensor>(at::ArrayRef<at::Tensor>(tensors)));
}

// Queue the kernel, and give tensors that it will fill.
Values run_later(Call& call, const Plan& plan) {
  Values values, host = on_cpu(call);
  Pairs targets(call.signature.returned.size());
  for (size_t k = 0; k < targets.size(); k++) {
    const int same = call.signature.returned[k];
    if (same != -1) {
      values.push_back(call.arguments[same]);
      continue;
    }
    std::vector<at::Tensor> made;
    for (const auto& shape : plan.outcomes[k].shapes) {
      made.push_back(allocate(shape, call.device));
      targets[k].push_back(made.back().defined() ? on_host(made.back()) : at::Tensor());
      if (made.back().defined()) call.uses.push_back({made.back(), true});
    }
    values.push_back(as_value(plan.outcomes[k], made));
  }
  submit(call.stream(), call.signature.name, call.uses,
         [op = call.op, host = std::move(host), targets = std::move(targets)]() mutable {
           Stack stack = std::move(host);
           op.redispatchBoxed(kCpu, &stack);
           fill_all(targets, stack);
         });
  return values;
}

at::Tensor upload(const Call& call, const at::Tensor& result) {
  if (!result.defined()) return result;
  auto made = at::empty_strided(result.sizes(), result.strides(),
                                at::TensorOptions(call.device).dtype(result.dtype()));
  auto target = on_host(made);
  submit(call.stream(), call.signature.name, {{made, true}},
         [=] { target.copy_(result); });
  return made;
}

// Where nobody knows what comes out: wait for it.
Values run_now(Call& call) {
  Stack stack = on_cpu(call);
  submit_and_wait(call.stream(), call.signature.name, call.uses,
                  [&] { call.op.redispatchBoxed(kCpu, &stack); });
  Values values;
  for (size_t k = 0; k < stack.size(); k++) {
    const int same = call.signature.returned[k];
    values.push_back(same != -1 ? call.arguments[same] : with_tensors(stack[k], [&](auto& tensor) {
      return upload(call, tensor);
    }));
  }
  return values;
}

// The CPU's kernel computes sizes, strides and where the view begins, and touches no memory.
Values view(const Call& call) {
  const auto& base = call.arguments[0].toTensor();
  Stack stack{on_host(base)};
  stack.insert(stack.end(), call.arguments.begin() + 1, call.arguments.end());
  auto* begin = static_cast<char*>(stack[0].toTensor().data_ptr());
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    call.op.redispatchBoxed(kCpu, &stack);
  }
  return {with_tensors(stack[0], [&](const at::Tensor& host) {
    auto* data = static_cast<char*>(host.data_ptr());
    const int64_t bytes = base.storage_offset() * base.itemsize() + (data - begin);
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), host.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(),
                                                      bytes / host.itemsize());
    return made;
  })};
}

// Who calls with an empty output asks for it to be resized.
void resize_outputs(Call& call) {
  bool is_empty = false;
  for (size_t k = 0; k < call.arguments.size(); k++)
    if (call.signature.writes[k] && call.arguments[k].isTensor())
      is_empty |= call.arguments[k].toTensor().numel() == 0;
  if (!is_empty) return;
  auto plan = plan_of(call.op, call.signature, call.arguments);
  for (size_t k = 0; !plan->is_unknown && k < plan->outcomes.size(); k++) {
    const int same = call.signature.returned[k];
    if (same != -1 && call.arguments[same].isTensor())
      call.arguments[same].toTensor().resize_(plan->outcomes[k].shapes.at(0).sizes);
  }
}

Values run(Call& call) {
  if (call.signature.is_view) return view(call);
  if (call.signature.is_out) resize_outputs(call);
  for (size_t k = 0; k < call.arguments.size(); k++)
    visit(call.arguments[k], [&](const at::Tensor& tensor) {
      check_device(call, tensor, call.signature.writes[k]);
      if (is_ours(tensor)) call.uses.push_back({tensor, call.signature.writes[k]});
    });
  if (call.signature.gives_tensors && call.signature.is_all_returned) return run_later(call, {});
  auto plan = plan_of(call.op, call.signature, call.arguments);
  return plan->is_unknown ? run_now(call) : run_later(call, *plan);
}

}  // namespace

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const Signature& signature = signature_of(op);
  TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU),
                              "the CPU, and so 'sim', has no kernel for ", signature.name);
  Values arguments = torch::jit::last(stack, signature.writes.size()).vec();
  const c10::Device device = device_of(signature, arguments);
  c10::DeviceGuard guard(device);
  at::NoGradGuard no_grad;
  Call call{op, signature, std::move(arguments), device, {}};
  Values values = run(call);
  torch::jit::drop(stack, signature.writes.size());
  for (auto& value : values) torch::jit::push(*stack, std::move(value));
}

}  // namespace sim

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::fallback>());
}
