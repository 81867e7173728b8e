// Random generators: kernels run later, so each is given a generator of its own when it is queued.
#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstring>

#include "stream.h"

namespace sim {
namespace {

struct State {
  uint64_t seed = c10::default_rng_seed_val;
  uint64_t offset = 0;
};

class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(int device, State state = {})
      : c10::GeneratorImpl(
            c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device)),
            c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        state_(state) {}

  static c10::DeviceType device_type() { return c10::DeviceType::PrivateUse1; }

  void set_current_seed(uint64_t seed) override { state_ = {seed, 0}; }
  void set_offset(uint64_t offset) override { state_.offset = offset; }
  uint64_t get_offset() const override { return state_.offset; }
  uint64_t current_seed() const override { return state_.seed; }

  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return state_.seed;
  }

  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == sizeof(State) && state.dtype() == caffe2::TypeMeta::Make<uint8_t>()
                    && state.is_cpu(),
                "the state of a generator of 'sim' has ", sizeof(State), " bytes");
    std::memcpy(&state_, state.data(), sizeof(State));
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({static_cast<int64_t>(sizeof(State))}, at::kByte);
    std::memcpy(state.data_ptr(), &state_, sizeof(State));
    return state.getIntrusivePtr();
  }

  uint64_t next() {
    std::lock_guard<std::mutex> lock(mutex_);
    return state_.seed * 0x9e3779b97f4a7c15 + 0x632be59bd9b4e019 * state_.offset++;
  }

 private:
  Generator* clone_impl() const override { return new Generator(device().index(), state_); }

  State state_;
};

}  // namespace

const at::Generator& default_generator(int device) {
  static auto* generators = [] {
    auto* made = new std::array<at::Generator, kDevices>;
    for (int k = 0; k < kDevices; k++) (*made)[k] = new_generator(k);
    return made;
  }();
  return generators->at(device == -1 ? current_device() : device);
}

at::Generator new_generator(int device) {
  return at::make_generator<Generator>(device == -1 ? current_device() : device);
}

at::Generator for_kernel(const at::Generator& generator) {
  return at::detail::createCPUGenerator(generator.get<Generator>()->next());
}

}  // namespace sim
