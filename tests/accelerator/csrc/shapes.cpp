// Shapes: from Meta kernels, by a cache.
#include "shapes.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/ScalarTypeToTypeMeta.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <unordered_map>

namespace sim {
namespace {

// A call, as bytes: equal ones give equal shapes.
class Key {
 public:
  bool is_complete = true;
  std::string bytes;

  void add(const c10::IValue& value) {
    if (value.isTensor()) {
      add_tensor(value.toTensor());
    } else if (value.isInt()) {
      put('i', value.toInt());
    } else if (value.isDouble()) {
      put('d', value.toDouble());
    } else if (value.isBool()) {
      put('b', value.toBool());
    } else if (value.isString()) {
      put('s', value.toStringRef().size());
      bytes += value.toStringRef();
    } else if (value.isList()) {
      put('l', value.toListRef().size());
      for (const auto& item : value.toListRef()) add(item);
    } else if (value.isDevice() || value.isGenerator() || value.isNone()) {
      bytes += 'n';  // the same shapes wherever it runs, and whatever it draws
    } else {
      is_complete = false;
    }
  }

 private:
  template <typename T>
  void put(char tag, T value) {
    bytes += tag;
    bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }

  void add_tensor(const at::Tensor& tensor) {
    if (!tensor.defined()) {
      bytes += 'u';
      return;
    }
    put('t', static_cast<char>(tensor.scalar_type()));
    put(tensor.is_cpu() ? 'c' : 'o', tensor.dim());
    for (int64_t size : tensor.sizes()) put('.', size);
    for (int64_t stride : tensor.strides()) put('.', stride);
    // A number on the CPU does not promote types, and some kernels look at it.
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) bytes += 'w';
  }
};

at::Tensor on_meta(const at::Tensor& tensor) {
  if (!is_ours(tensor)) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(),
                           at::TensorOptions(at::kMeta).dtype(tensor.dtype()));
}

c10::IValue argument_on_meta(const c10::IValue& value) {
  if (value.isDevice()) return c10::Device(at::kMeta);
  if (value.isGenerator()) return c10::IValue();
  return with_tensors(value, on_meta);
}

// Those written in Python call functions of PyTorch, which modes of the caller must not see.
class NoModes {
 public:
  NoModes() : before_(at::impl::PythonTorchFunctionTLS::get_disabled_state()) {
    at::impl::PythonTorchFunctionTLS::set_disabled_state(
        at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  }
  ~NoModes() { at::impl::PythonTorchFunctionTLS::set_disabled_state(before_); }

 private:
  at::impl::TorchFunctionDisabledState before_;
  c10::impl::ExcludeDispatchKeyGuard no_python_{c10::DispatchKeySet(
      {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

Shape shape_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  TORCH_CHECK(tensor.is_meta(), "not a shape");
  return {true, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()};
}

Outcome outcome_of(const c10::IValue& value) {
  Outcome outcome;
  outcome.is_list = value.isList();
  if (!outcome.is_list) {
    outcome.shapes.push_back(value.isTensor() ? shape_of(value.toTensor()) : Shape());
    return outcome;
  }
  for (const auto& item : value.toListRef()) outcome.shapes.push_back(shape_of(item.toTensor()));
  return outcome;
}

Plan ask(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments) {
  Plan plan;
  try {
    NoModes no_modes;
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    torch::jit::Stack stack;
    for (const auto& argument : arguments) stack.push_back(argument_on_meta(argument));
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    for (const auto& value : stack) plan.outcomes.push_back(outcome_of(value));
    plan.is_unknown = false;
  } catch (const std::exception&) {
    // If the call itself is wrong, the CPU's kernel will say so.
  }
  return plan;
}

}  // namespace

std::shared_ptr<const Plan> plan_of(const c10::OperatorHandle& op, const Signature& signature,
                                    at::ArrayRef<c10::IValue> arguments) {
  static auto* mutex = new std::mutex;
  static auto* plans = new std::unordered_map<std::string, std::shared_ptr<const Plan>>;
  if (!signature.gives_tensors) return std::make_shared<Plan>();
  Key key;
  // Integers divided give floats of the type that is the default now.
  key.add(static_cast<int64_t>(c10::typeMetaToScalarType(c10::get_default_dtype())));
  key.add(c10::IValue(reinterpret_cast<int64_t>(&op.schema())));
  for (const auto& argument : arguments) key.add(argument);
  if (key.is_complete) {
    std::lock_guard<std::mutex> lock(*mutex);
    auto found = plans->find(key.bytes);
    if (found != plans->end()) return found->second;
  }
  auto plan = std::make_shared<const Plan>(ask(op, arguments));
  if (key.is_complete) {
    std::lock_guard<std::mutex> lock(*mutex);
    plans->emplace(key.bytes, plan);
  }
  return plan;
}

}  // namespace sim
