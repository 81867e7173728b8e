// What PyTorch asks of a device: which is current, streams, events, waits.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "allocator.h"
#include "stream.h"

namespace sim {
namespace {

using c10::DeviceIndex;
using c10::DeviceType;

// An event is the point at which it was recorded last.
struct Event {
  PointPtr point;
};

Event* as_event(void* event) { return static_cast<Event*>(event); }

c10::Device face(int device) {
  return c10::Device(DeviceType::PrivateUse1, static_cast<DeviceIndex>(device));
}

int index_of(c10::Device device) {
  return device.index() == -1 ? current_device() : device.index();
}

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::PrivateUse1; }

  c10::Device exchangeDevice(c10::Device device) const override {
    return face(exchange_device(index_of(device)));
  }

  c10::Device getDevice() const override { return face(current_device()); }

  void setDevice(c10::Device device) const override { exchange_device(index_of(device)); }

  void uncheckedSetDevice(c10::Device device) const noexcept override {
    exchange_device(index_of(device));
  }

  DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(index_of(device)).face();
  }

  c10::Stream getDefaultStream(c10::Device device) const override {
    return default_stream(index_of(device)).face();
  }

  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return new_stream(index_of(device)).face();
  }

  c10::Stream getNewStream(c10::Device device, int) const override {
    return new_stream(index_of(device)).face();
  }

  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = current_stream(stream.device_index()).face();
    set_current(stream_of(stream));
    return before;
  }

  void record(void** event, const c10::Stream& stream, DeviceIndex,
              c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    as_event(*event)->point = sim::record(stream_of(stream));
  }

  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) sim::block(stream_of(stream), as_event(event)->point);
  }

  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete as_event(event); }

  bool queryEvent(void* event) const override {
    return event == nullptr || query(as_event(event)->point);
  }

  void synchronizeEvent(void* event) const override {
    if (event != nullptr) wait(as_event(event)->point);
  }

  double elapsedTime(void* first, void* second, DeviceIndex) const override {
    TORCH_CHECK(first != nullptr && second != nullptr, "both events must be recorded");
    auto &a = as_event(first)->point, &b = as_event(second)->point;
    TORCH_CHECK(a->is_reached() && b->is_reached(), "both events must be completed");
    return std::chrono::duration<double, std::milli>(b->time() - a->time()).count();
  }

  bool queryStream(const c10::Stream& stream) const override { return query(stream_of(stream)); }

  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize(stream_of(stream));
  }

  void synchronizeDevice(DeviceIndex device) const override {
    synchronize_device(index_of(face(device)));
  }

  void recordDataPtrOnStream(const c10::DataPtr& memory,
                             const c10::Stream& stream) const override {
    allocator().recordStream(memory, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace

bool is_ordered(uintptr_t before, uintptr_t after) {
  auto point_of = [](uintptr_t id) {
    TORCH_CHECK(id != 0, "the event was not recorded");
    return reinterpret_cast<Event*>(id)->point;
  };
  const PointPtr first = point_of(before), second = point_of(after);
  Order order;
  const auto time = first->clock.at(first->stream);
  TORCH_CHECK(time > 0, "the event was recorded while the detector was off");
  return second->clock.at(first->stream) >= time;
}

}  // namespace sim
