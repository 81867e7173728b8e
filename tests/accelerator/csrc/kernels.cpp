// What the fallback can not do: memory, copies, views, and kernels that the CPU has otherwise.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>

#include "fallback.h"
#include "kernel.h"
#include "pinned.h"

namespace sim {
namespace {

using at::Tensor;
using std::optional;

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::DeviceGuard guard_for(optional<c10::Device> device) {
  return c10::DeviceGuard(device.value_or(c10::Device(c10::DeviceType::PrivateUse1)));
}

Tensor empty(at::IntArrayRef sizes, optional<at::ScalarType> type, optional<at::Layout>,
             optional<c10::Device> device, optional<bool>, optional<at::MemoryFormat> format) {
  auto guard = guard_for(device);
  return at::detail::empty_generic(sizes, &allocator(), kKeys, c10::dtype_or_default(type),
                                   format);
}

Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, optional<at::ScalarType> type,
                     optional<at::Layout>, optional<c10::Device> device, optional<bool>) {
  auto guard = guard_for(device);
  return at::detail::empty_strided_generic(sizes, strides, &allocator(), kKeys,
                                           c10::dtype_or_default(type));
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef sizes,
                      optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const size_t bytes = (self.storage_offset() + self.numel()) * self.itemsize();
  if (self.numel() > 0 && bytes > self.storage().nbytes()) resize_storage(self.storage(), bytes);
  return self;
}

void record_stream(Tensor& self, c10::Stream stream) {
  allocator().recordStream(self.storage().data_ptr(), stream);
}

std::atomic<uint64_t> copy_time{0};

void copy_within(const Tensor& source, const Tensor& target, uint64_t microseconds = 0) {
  Stream& stream = current_stream(source.device().index());
  submit(stream, "aten::copy_", {{source, false}, {target, true}},
         [=, from = on_host(source), to = on_host(target)] {
           spend(std::chrono::microseconds(microseconds));
           to.copy_(from);
         });
}

// As CUDA does it: on the source's current stream, and the target's one waits before and after.
void copy_between(const Tensor& source, const Tensor& target) {
  Stream& here = current_stream(source.device().index());
  Stream& there = current_stream(target.device().index());
  block(here, record(there));
  copy_within(source, target, copy_time);
  block(there, record(here));
}

// Memory of the host that is not pinned is copied at once, and what is written may be late.
void copy_from_cpu(const Tensor& source, const Tensor& target) {
  Stream& stream = current_stream(target.device().index());
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  submit(stream, "aten::copy_ from the CPU", {{target, true}},
         [from = source.clone(), to = on_host(target)] { to.copy_(from); });
}

void copy_to_cpu(const Tensor& source, const Tensor& target, bool may_be_late) {
  Stream& stream = current_stream(source.device().index());
  auto task = [from = on_host(source), to = target.detach()] { to.copy_(from); };
  if (!may_be_late) {
    submit_and_wait(stream, "aten::copy_ to the CPU", {{source, false}}, task);
    return;
  }
  // Who looks before it has come finds NaN.
  if (target.is_contiguous()) std::memset(target.mutable_data_ptr(), kPoison, target.nbytes());
  submit(stream, "aten::copy_ to the CPU", {{source, false}}, task);
}

// To pinned memory and from it, the copy comes in the order of the stream; its memory may be freed
// before that.
void copy_pinned(const Tensor& source, const Tensor& target, bool may_be_late) {
  Stream& stream = current_stream((is_ours(source) ? source : target).device().index());
  auto task = [from = on_host(source), to = on_host(target)] { to.copy_(from); };
  {
    Order order;
    pinned_block_of((is_ours(source) ? target : source).storage().data_ptr())
        ->users.insert(&stream);
  }
  const std::vector<Use> uses{{source, false}, {target, true}};
  if (may_be_late)
    submit(stream, "aten::copy_ of pinned memory", uses, task);
  else
    submit_and_wait(stream, "aten::copy_ of pinned memory", uses, task);
}

bool is_pinned(const Tensor& tensor) {
  return pinned_block_of(tensor.storage().data_ptr()) != nullptr;
}

Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Tensor source = self.sizes() == target.sizes() ? self : self.expand(target.sizes());
  if (is_pinned(source) || is_pinned(target))
    copy_pinned(source, target, non_blocking);
  else if (!is_ours(source))
    copy_from_cpu(source, target);
  else if (!is_ours(target))
    copy_to_cpu(source, target, non_blocking);
  else if (source.device() == target.device())
    copy_within(source, target);
  else
    copy_between(source, target);
  return target;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

Tensor& set_source_at(Tensor& self, c10::Storage source, int64_t offset, at::IntArrayRef sizes,
                      at::IntArrayRef strides) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (strides.empty() && !sizes.empty())
    self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  else
    self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return self;
}

Tensor& set_source(Tensor& self, c10::Storage source) {
  const int64_t count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_source_at(self, std::move(source), 0, {count}, {});
}

Tensor& set_empty(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, allocator().allocate(0), &allocator(),
                       true);
  return set_source_at(self, std::move(storage), 0, {0}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_source_at(self, source.storage(), source.storage_offset(), source.sizes(),
                       source.strides());
}

// The CPU's kernel draws from the default generator of the process.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, optional<bool> train) {
  if (train.has_value() && !*train)
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  if (input.numel() == 0 || p == 1.)
    return {input.mul(0.), at::empty_like(input, input.options().dtype(at::kBool)).fill_(false)};
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1. - p);
  return {input.mul(mask).mul_(1. / (1. - p)), mask};
}

Tensor native_dropout_backward(const Tensor& grad, const Tensor& mask, double scale) {
  return grad.mul(mask).mul_(scale);
}

}  // namespace

void set_copy_time(uint64_t microseconds) { copy_time = microseconds; }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("set_.source_Storage", set_source);
  m.impl("set_.source_Storage_storage_offset", set_source_at);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_empty);
  m.impl("native_dropout", native_dropout);
  m.impl("native_dropout_backward", native_dropout_backward);
  // PyTorch has generic kernels for these, which end where no backend overrides them, or round
  // otherwise than those of the CPU.
  for (auto name : {"convolution", "convolution_backward", "native_layer_norm",
                    "native_group_norm"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Copies look at these bits themselves. To resolve them, PyTorch would copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace sim
