// What PyTorch asks of a whole backend: is it there, its generators, its storages.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>

#include <cstring>

#include "allocator.h"
#include "generator.h"
#include "kernel.h"
#include "pinned.h"

namespace sim {
namespace {

using c10::DeviceIndex;

struct Hooks final : public at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(DeviceIndex device) const override { exchange_device(device); }
  DeviceIndex getCurrentDevice() const override {
    return static_cast<DeviceIndex>(current_device());
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return static_cast<DeviceIndex>(exchange_device(device));
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return new_generator(device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

struct Registration {
  Registration() {
    static auto* hooks = new Hooks;
    at::RegisterPrivateUse1HooksInterface(hooks);
    c10::SetAllocator(c10::DeviceType::PrivateUse1, &allocator());
  }
} registration;

}  // namespace
}  // namespace sim
