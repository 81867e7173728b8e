// Arguments: what a schema says of them, and the tensors among them.
#include "arguments.h"

#include <unordered_map>

namespace sim {
namespace {

bool is_tensor_type(const c10::TypePtr& type) {
  if (type->kind() == c10::TypeKind::ListType)
    return is_tensor_type(type->castRaw<c10::ListType>()->getElementType());
  if (type->kind() == c10::TypeKind::OptionalType)
    return is_tensor_type(type->castRaw<c10::OptionalType>()->getElementType());
  return type->kind() == c10::TypeKind::TensorType;
}

bool is_generator_type(const c10::TypePtr& type) {
  if (type->kind() == c10::TypeKind::OptionalType)
    return is_generator_type(type->castRaw<c10::OptionalType>()->getElementType());
  return type->kind() == c10::TypeKind::GeneratorType;
}

// Some write to arguments of which their schemas do not say so.
bool writes_secretly(const std::string& name, const std::string& argument) {
  return name.rfind("aten::native_batch_norm", 0) == 0 &&
         (argument == "running_mean" || argument == "running_var");
}

int find_argument(const c10::FunctionSchema& schema, const c10::AliasInfo& alias) {
  const auto& arguments = schema.arguments();
  for (size_t k = 0; k < arguments.size(); k++) {
    const auto* info = arguments[k].alias_info();
    if (info != nullptr && info->beforeSets() == alias.beforeSets()) return static_cast<int>(k);
  }
  return -1;
}

}  // namespace

Signature::Signature(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  name = schema.name();
  for (const auto& argument : schema.arguments()) {
    const auto* alias = argument.alias_info();
    const bool is_write = alias != nullptr && alias->isWrite();
    is_out |= is_write && argument.is_out();
    if (is_generator_type(argument.type())) generator = static_cast<int>(writes.size());
    writes.push_back(is_write || writes_secretly(name, argument.name()));
  }
  for (const auto& value : schema.returns()) {
    gives_tensors &= is_tensor_type(value.type());
    const auto* alias = value.alias_info();
    returned.push_back(alias != nullptr && alias->isWrite() ? find_argument(schema, *alias) : -1);
    is_view |= alias != nullptr && !alias->isWrite();
    is_all_returned &= returned.back() != -1;
  }
}

const Signature& signature_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const c10::FunctionSchema*, Signature> signatures;
  auto found = signatures.find(&op.schema());
  if (found == signatures.end()) found = signatures.emplace(&op.schema(), Signature(op)).first;
  return found->second;
}

void visit(const c10::IValue& value, const Visitor& visitor) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visitor(value.toTensor());
  } else if (value.isList()) {
    // Lists of optional tensors have undefined ones, or None, in between.
    for (const auto& item : value.toListRef()) {
      if (!item.isTensor() && !item.isNone()) return;
      visit(item, visitor);
    }
  }
}

c10::IValue with_tensors(const c10::IValue& value, const Change& change) {
  if (value.isTensor())
    return value.toTensor().defined() ? c10::IValue(change(value.toTensor())) : value;
  if (!value.isList()) return value;
  const auto list = value.toList();
  if (!is_tensor_type(list.elementType())) return value;
  c10::impl::GenericList changed(list.elementType());
  for (const auto& item : value.toListRef()) changed.push_back(with_tensors(item, change));
  return changed;
}

}  // namespace sim
