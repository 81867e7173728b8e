// Pinned memory of the host.
#include "pinned.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>

#include "allocator.h"

namespace sim {
namespace {

void free_pinned(void* context);
void free_nothing(void*) {}

class Pinned final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &free_nothing, at::kCPU};
    Order order;
    collect();
    void* memory = nullptr;
    TORCH_CHECK(posix_memalign(&memory, 64, bytes) == 0, "out of pinned memory: ", bytes);
    std::memset(memory, kPoison, bytes);
    auto* block = new PinnedBlock{memory, bytes, {}, {}, {}, 0};
    blocks_.emplace(static_cast<char*>(memory), block);
    return {memory, block, &free_pinned, at::kCPU};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void* target, const void* source, size_t count) const override {
    std::memcpy(target, source, count);
  }

  void give_back(PinnedBlock* block) {
    Order order;
    blocks_.erase(static_cast<char*>(block->memory));
    for (Stream* user : block->users) block->ends.push_back(record_locked(*user));
    freed_.push_back(block);
    collect();
  }

  bool has(const void* address) {
    Order order;
    auto* begin = const_cast<char*>(static_cast<const char*>(address));
    auto after = blocks_.upper_bound(begin);
    if (after == blocks_.begin()) return false;
    auto& [start, block] = *std::prev(after);
    return begin < start + block->size;
  }

 private:
  void collect() {
    auto is_in_use = [](PinnedBlock* block) {
      return std::any_of(block->ends.begin(), block->ends.end(),
                         [](auto& end) { return !end->is_reached(); });
    };
    auto over = std::stable_partition(freed_.begin(), freed_.end(), is_in_use);
    for (auto k = over; k != freed_.end(); ++k) {
      std::free((*k)->memory);
      delete *k;
    }
    freed_.erase(over, freed_.end());
  }

  std::map<char*, PinnedBlock*> blocks_;
  std::vector<PinnedBlock*> freed_;
};

Pinned& instance() {
  static auto* allocator = new Pinned;
  return *allocator;
}

void free_pinned(void* context) {
  if (!is_forked()) instance().give_back(static_cast<PinnedBlock*>(context));
}

}  // namespace

History& PinnedBlock::accesses() {
  if (epoch != detector::epoch()) {
    history.clear();
    epoch = detector::epoch();
  }
  return history;
}

c10::Allocator& pinned_allocator() { return instance(); }

bool is_pinned(const void* address) { return instance().has(address); }

PinnedBlock* pinned_block_of(const c10::DataPtr& memory) {
  return memory.get_deleter() == &free_pinned ? static_cast<PinnedBlock*>(memory.get_context())
                                              : nullptr;
}

}  // namespace sim
