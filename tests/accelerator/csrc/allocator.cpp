// The caching allocator: keeps freed blocks per stream, and counts.
#include "allocator.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>

namespace sim {
namespace {

using Stats = c10::CachingDeviceAllocator::DeviceStats;

constexpr size_t kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
constexpr size_t kUnit = 512;

size_t round_up(size_t bytes) { return (bytes + kUnit - 1) / kUnit * kUnit; }

// What was freed on one stream.
struct Cache {
  std::vector<Block*> in_use_elsewhere;
  std::vector<Block*> freed;
  std::multimap<size_t, Block*> clean;
};

void free_block(void* context);
void free_nothing(void*) {}

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    c10::Device face(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device));
    if (bytes == 0) return {nullptr, nullptr, &free_nothing, face};
    Block* block = take(current_stream(device), bytes);
    return {block->memory, block, &free_block, face};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void* target, const void* source, size_t count) const override {
    synchronize_device(current_device());
    std::memcpy(target, source, count);
  }

  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < kDevices; device++) empty_cache(device);
  }

  void recordStream(const c10::DataPtr& memory, c10::Stream face) override {
    Order order;
    Block* block = block_of(memory);
    Stream& stream = stream_of(face);
    if (block != nullptr && &stream != block->stream) block->users.insert(&stream);
  }

  Stats getDeviceStats(c10::DeviceIndex device) override {
    Order order;
    return stats_.at(device);
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Order order;
    for (auto* stat : stats_of(device)) (*stat)[kAll].reset_accumulated();
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    Order order;
    for (auto* stat : stats_of(device)) (*stat)[kAll].reset_peak();
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Order order;
    const size_t used = reserved(device).current;
    return {limit > used ? limit - used : 0, limit};
  }

  void give_back(Block* block) {
    Order order;
    Stats& stats = stats_[block->stream->device];
    stats.allocation[kAll].decrease(1);
    stats.allocated_bytes[kAll].decrease(block->size);
    stats.requested_bytes[kAll].decrease(block->size);
    Cache& cache = caches_[block->stream];
    for (Stream* user : block->users) block->ends.push_back(record_locked(*user));
    (block->ends.empty() ? cache.freed : cache.in_use_elsewhere).push_back(block);
    block->users.clear();
  }

  size_t limit = size_t{8} << 30;

 private:
  Block* take(Stream& stream, size_t bytes) {
    const size_t size = round_up(bytes);
    bool is_full = false;
    {
      Order order;
      if (Block* block = find(stream, size)) return hand_out(block, size);
      is_full = reserved(stream.device).current + size > limit;
    }
    if (is_full) empty_cache(stream.device);
    Order order;
    Block* block = make(stream, size);
    return hand_out(block, size);
  }

  Block* find(Stream& stream, size_t size) {
    Cache& cache = caches_[&stream];
    collect(cache);
    poison(stream, cache);
    auto found = cache.clean.lower_bound(size);
    // A block that is far too large is left for those that need it.
    if (found == cache.clean.end() || found->first > 2 * size) return nullptr;
    Block* block = found->second;
    cache.clean.erase(found);
    return block;
  }

  // Other streams may be done by now with what they were said to use. As on CUDA, this is found out
  // by looking, and nobody waits for it.
  void collect(Cache& cache) {
    auto is_over = [](Block* block) {
      for (auto& end : block->ends)
        if (!end->is_reached()) return false;
      return true;
    };
    auto& blocks = cache.in_use_elsewhere;
    auto over = std::stable_partition(blocks.begin(), blocks.end(),
                                      [&](Block* block) { return !is_over(block); });
    for (auto k = over; k != blocks.end(); ++k) {
      for (auto& end : (*k)->ends) detector::forget((*k)->history, end->clock);
      (*k)->ends.clear();
      cache.freed.push_back(*k);
    }
    blocks.erase(over, blocks.end());
  }

  void poison(Stream& stream, Cache& cache) {
    if (cache.freed.empty()) return;
    std::vector<std::pair<void*, size_t>> ranges;
    if (detector::is_on()) detector::tick(stream.number);
    for (Block* block : cache.freed) {
      note(stream, block, "the next owner of memory that was freed");
      ranges.emplace_back(block->memory, block->capacity);
      cache.clean.emplace(block->capacity, block);
    }
    cache.freed.clear();
    stream.push([ranges] { for (auto& r : ranges) std::memset(r.first, kPoison, r.second); },
                false);
  }

  void note(Stream& stream, Block* block, const char* what) {
    if (!detector::is_on()) return;
    auto operation = std::make_shared<Operation>(Operation{what, stream.name, ""});
    detector::access(stream.number, block->accesses(), 0, block->capacity, true, operation);
  }

  Block* make(Stream& stream, size_t size) {
    auto& reserved_bytes = reserved(stream.device);
    void* memory = nullptr;
    const bool fits = reserved_bytes.current + size <= limit;
    TORCH_CHECK_WITH(OutOfMemoryError, fits && posix_memalign(&memory, 64, size) == 0,
                     "sim:", stream.device, " out of memory: tried to allocate ", size,
                     " bytes, with ", reserved_bytes.current, " of ", limit, " in use");
    std::memset(memory, kPoison, size);
    reserved_bytes.increase(size);
    stats_[stream.device].segment[kAll].increase(1);
    auto* block = new Block{memory, size, size, &stream, {}, {}, {}, 0};
    // It could have been one that was used before. Who uses it on another stream must wait.
    if (detector::is_on()) detector::tick(stream.number);
    note(stream, block, "the allocation");
    return block;
  }

  Block* hand_out(Block* block, size_t size) {
    block->size = size;
    Stats& stats = stats_[block->stream->device];
    stats.allocation[kAll].increase(1);
    stats.allocated_bytes[kAll].increase(size);
    stats.requested_bytes[kAll].increase(size);
    return block;
  }

  void empty_cache(int device) {
    synchronize_device(device);
    Order order;
    for (auto& [stream, cache] : caches_) {
      if (stream->device != device) continue;
      collect(cache);
      for (Block* block : cache.freed) release(block);
      for (auto& [size, block] : cache.clean) release(block);
      cache.freed.clear();
      cache.clean.clear();
    }
  }

  void release(Block* block) {
    reserved(block->stream->device).decrease(block->capacity);
    stats_[block->stream->device].segment[kAll].decrease(1);
    std::free(block->memory);
    delete block;
  }

  c10::CachingAllocator::Stat& reserved(int device) {
    return stats_[device].reserved_bytes[kAll];
  }

  std::vector<c10::CachingAllocator::StatArray*> stats_of(int device) {
    Stats& s = stats_.at(device);
    return {&s.allocation, &s.segment, &s.allocated_bytes, &s.reserved_bytes, &s.requested_bytes};
  }

  std::map<Stream*, Cache> caches_;
  std::array<Stats, kDevices> stats_;
};

Allocator& instance() {
  static auto* allocator = new Allocator;
  return *allocator;
}

void free_block(void* context) {
  if (!is_forked()) instance().give_back(static_cast<Block*>(context));
}

}  // namespace

History& Block::accesses() {
  if (epoch != detector::epoch()) {
    history.clear();
    epoch = detector::epoch();
  }
  return history;
}

c10::DeviceAllocator& allocator() { return instance(); }

Block* block_of(const c10::DataPtr& memory) {
  return memory.get_deleter() == &free_block ? static_cast<Block*>(memory.get_context()) : nullptr;
}

void set_memory_limit(size_t bytes) {
  Order order;
  instance().limit = bytes;
}

}  // namespace sim
