// Shapes: what an operation will give, known before it runs.
#pragma once

#include "arguments.h"

namespace sim {

struct Shape {
  bool is_defined = false;
  std::vector<int64_t> sizes, strides;
  at::ScalarType type = at::kFloat;
};

// One return of an operation: a tensor, or a list of them.
struct Outcome {
  bool is_list = false;
  std::vector<Shape> shapes;
};

struct Plan {
  // Whether the shapes depend on what is in the tensors, or are told by nobody.
  bool is_unknown = true;
  std::vector<Outcome> outcomes;
};

// Asks the Meta kernels, and remembers: many of them are written in Python and slow.
std::shared_ptr<const Plan> plan_of(const c10::OperatorHandle& op, const Signature& signature,
                                    at::ArrayRef<c10::IValue> arguments);

}  // namespace sim
