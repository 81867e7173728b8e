// Kernels: how they get onto streams.
#include "kernel.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>

#include <cstring>

#include "pinned.h"

namespace sim {
namespace {

// The bytes of its block that lie between a tensor's first and last element.
struct Extent {
  History* accesses = nullptr;
  size_t low = 0, high = 0;
};

Extent extent_of(const at::Tensor& tensor) {
  Extent extent;
  if (tensor.numel() == 0) return extent;
  const auto& memory = tensor.storage().data_ptr();
  if (Block* block = block_of(memory)) extent.accesses = &block->accesses();
  if (PinnedBlock* block = pinned_block_of(memory)) extent.accesses = &block->accesses();
  size_t last = 0;
  for (int64_t k = 0; k < tensor.dim(); k++) last += (tensor.size(k) - 1) * tensor.stride(k);
  extent.low = tensor.storage_offset() * tensor.itemsize();
  extent.high = extent.low + (last + 1) * tensor.itemsize();
  return extent;
}

void tell_detector(Stream& stream, const std::string& name, const std::string& line,
                   const std::vector<Use>& uses) {
  auto operation = std::make_shared<Operation>(Operation{name, stream.name, line});
  detector::tick(stream.number);
  for (const Use& use : uses) {
    Extent extent = extent_of(use.tensor);
    if (extent.accesses != nullptr)
      detector::access(stream.number, *extent.accesses, extent.low, extent.high, use.write,
                       operation);
  }
}

}  // namespace

std::string (*python_line)() = [] { return std::string(); };

at::Tensor on_host(const at::Tensor& tensor) {
  auto options = at::TensorOptions(at::kCPU).dtype(tensor.dtype());
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  auto memory = static_cast<char*>(tensor.storage().mutable_data());
  void* data = memory == nullptr ? nullptr : memory + tensor.storage_offset() * tensor.itemsize();
  auto host = at::from_blob(data, tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) host._set_conj(true);
  if (tensor.is_neg()) host._set_neg(true);
  return host;
}

void submit(Stream& stream, const std::string& name, const std::vector<Use>& uses, Task task) {
  const std::string line = detector::wants_lines() ? python_line() : "";
  Order order;
  if (detector::is_on()) tell_detector(stream, name, line, uses);
  stream.push(std::move(task), true);
}

void submit_and_wait(Stream& stream, const std::string& name, const std::vector<Use>& uses,
                     const Task& task) {
  std::exception_ptr error;
  submit(stream, name, uses, [&] {
    try {
      task();
    } catch (...) {
      error = std::current_exception();
    }
  });
  synchronize(stream);
  if (error) std::rethrow_exception(error);
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  TORCH_CHECK(impl->resizable(), "this storage can not be resized");
  c10::DeviceGuard guard(storage.device());
  auto memory = allocator().allocate(bytes);
  void *target = memory.get(), *source = impl->mutable_data();
  const size_t count = std::min(bytes, impl->nbytes());
  if (count > 0) {
    Stream& stream = current_stream(storage.device().index());
    Order order;
    if (detector::is_on()) {
      auto operation = std::make_shared<Operation>(Operation{"resize", stream.name, ""});
      detector::tick(stream.number);
      detector::access(stream.number, block_of(storage.data_ptr())->accesses(), 0, count, false,
                       operation);
      detector::access(stream.number, block_of(memory)->accesses(), 0, count, true, operation);
    }
    stream.push([=] { std::memcpy(target, source, count); }, true);
  }
  impl->set_data_ptr_noswap(std::move(memory));
  impl->set_nbytes(bytes);
}

}  // namespace sim
