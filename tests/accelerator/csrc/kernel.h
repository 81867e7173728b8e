// Kernels: work on tensors that is put onto a stream, and what the detector is told of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "allocator.h"
#include "stream.h"

namespace sim {

inline bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

struct Use {
  at::Tensor tensor;
  bool write;
};

// A tensor of the CPU over the memory of one of ours. It owns nothing: as on CUDA, memory may be
// freed while kernels that use it are still queued.
at::Tensor on_host(const at::Tensor& tensor);

// Puts a kernel onto a stream. Who uses it through `uses` need not keep the tensors.
void submit(Stream& stream, const std::string& name, const std::vector<Use>& uses, Task task);
// The same, and waits for the stream; errors of the task come at once.
void submit_and_wait(Stream& stream, const std::string& name, const std::vector<Use>& uses,
                     const Task& task);

// Copies between devices take so much longer than the memory of the host.
void set_copy_time(uint64_t microseconds);

// Gives a storage other memory, with what fits of what was in it.
void resize_storage(const c10::Storage& storage, size_t bytes);

// Tells the line of Python that the calling thread is at, for reports. Set by the binding.
extern std::string (*python_line)();

}  // namespace sim
