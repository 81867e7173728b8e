// The caching allocator: memory that is freed goes to the next taker on its stream, at once.
//
// As that of CUDA it looks at no other stream than the one on which memory was allocated, and at
// those that `record_stream` named. What it may hand out again it fills with NaN, in the order of
// the stream, so that whoever still reads it elsewhere gets wrong numbers. To the detector that is
// a write. It comes with the next allocation on that stream, of whatever size: which block the next
// taker gets is chance, and must not matter.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <set>
#include <vector>

#include "detector.h"
#include "stream.h"

namespace sim {

// What memory is filled with that nobody may read: NaN in each floating type, -1 as an integer.
constexpr int kPoison = 0xff;

struct Block {
  void* memory;
  size_t capacity;
  size_t size;
  Stream* stream;
  // Other streams that `record_stream` named, and the points on them at which it was freed.
  std::set<Stream*> users;
  std::vector<PointPtr> ends;
  History history;
  uint64_t epoch = 0;

  // Under the lock of Order. Drops what the detector was told before it was switched on.
  History& accesses();
};

c10::DeviceAllocator& allocator();
// The block in which a tensor's storage lies; none if it has no bytes.
Block* block_of(const c10::DataPtr& memory);
// Allocations beyond so many bytes on a device fail, once what is cached was freed.
void set_memory_limit(size_t bytes);

}  // namespace sim
