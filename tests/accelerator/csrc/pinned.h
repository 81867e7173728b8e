// Memory of the host that is pinned: copies to it and from it are late, in the order of a stream.
//
// As that of CUDA, the allocator waits with what was freed for the streams whose copies use it.
#pragma once

#include <c10/core/Allocator.h>

#include <set>
#include <vector>

#include "detector.h"
#include "stream.h"

namespace sim {

struct PinnedBlock {
  void* memory;
  size_t size;
  // The streams whose copies use it, and the points on them at which it was freed.
  std::set<Stream*> users;
  std::vector<PointPtr> ends;
  History history;
  uint64_t epoch = 0;

  // Under the lock of Order. Drops what the detector was told before it was switched on.
  History& accesses();
};

c10::Allocator& pinned_allocator();
// Whether an address is in such memory.
bool is_pinned(const void* address);
// The block in which the storage of a tensor lies; none if that is not pinned.
PinnedBlock* pinned_block_of(const c10::DataPtr& memory);

}  // namespace sim
