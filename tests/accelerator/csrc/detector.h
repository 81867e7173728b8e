// Happens-before: which operation is ordered after which, told by vector clocks.
//
// Each stream counts its operations. A clock says, for each stream, up to which operation all is
// known to be over. Events carry clocks from stream to stream, waits of the host carry them to
// everything that is queued later. An access of memory that is not ordered after a conflicting one
// is a race, whether or not it came out right this time. Everything here is called in the order of
// the queues, under their lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace sim {

class Clock {
 public:
  uint32_t at(int stream) const;
  void set(int stream, uint32_t time);
  void join(const Clock& other);

 private:
  std::vector<uint32_t> times_;
};

// What was queued: for reports.
struct Operation {
  std::string name;
  std::string stream;
  std::string line;
};

// One operation's use of bytes [low, high) of a block.
struct Access {
  int stream;
  uint32_t time;
  size_t low, high;
  bool write;
  std::shared_ptr<const Operation> operation;
};

// The accesses of a block that a later one may still be in conflict with.
using History = std::vector<Access>;

namespace detector {

bool is_on();
bool wants_lines();
// Forgets what was before, so that it can be switched on at any time.
void set(bool on, bool lines);

// The next operation of a stream begins.
void tick(int stream);
const Clock& clock_of(int stream);
// A stream waits for an event with that clock.
void join(int stream, const Clock& clock);
// The host has waited for it: whatever is queued from now on comes later.
void join_host(const Clock& clock);

// The last operation of a stream uses memory.
void access(int stream, History& history, size_t low, size_t high, bool write,
            const std::shared_ptr<const Operation>& operation);
// All that is over at that clock can be in conflict with nothing any more.
void forget(History& history, const Clock& clock);
// A number that changes when histories of before have to be dropped.
uint64_t epoch();

std::vector<std::string> races();
void clear_races();

}  // namespace detector
}  // namespace sim
