// The arguments of any operation, as its schema describes them.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>
#include <vector>

#include "kernel.h"

namespace sim {

// What the schema of an operation says.
struct Signature {
  explicit Signature(const c10::OperatorHandle& op);

  std::string name;
  std::vector<bool> writes;   // by argument
  std::vector<int> returned;  // by return: the argument that it is, or -1 for a new tensor
  bool is_view = false;       // gives a view of its first argument
  bool is_all_returned = true;
  bool is_out = false;        // writes to arguments that are there for nothing else
  bool gives_tensors = true;  // and nothing else
  int generator = -1;         // the place of the generator among the arguments
};

const Signature& signature_of(const c10::OperatorHandle& op);

using Visitor = std::function<void(const at::Tensor&)>;
using Change = std::function<at::Tensor(const at::Tensor&)>;

// Calls with each defined tensor, also in lists.
void visit(const c10::IValue& value, const Visitor& visitor);
// The same value with other tensors.
c10::IValue with_tensors(const c10::IValue& value, const Change& change);

}  // namespace sim
