// The fallback: any operation of the CPU, as a kernel of a stream.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace sim {

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace sim
