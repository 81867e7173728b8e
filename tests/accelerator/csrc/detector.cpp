// The race detector: keeps clocks and compares accesses.
#include "detector.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <set>

namespace sim {

uint32_t Clock::at(int stream) const {
  return static_cast<size_t>(stream) < times_.size() ? times_[stream] : 0;
}

void Clock::set(int stream, uint32_t time) {
  if (times_.size() <= static_cast<size_t>(stream)) times_.resize(stream + 1);
  times_[stream] = time;
}

void Clock::join(const Clock& other) {
  if (times_.size() < other.times_.size()) times_.resize(other.times_.size());
  for (size_t k = 0; k < other.times_.size(); k++)
    times_[k] = std::max(times_[k], other.times_[k]);
}

namespace detector {
namespace {

struct State {
  std::atomic<bool> on{false};
  std::atomic<bool> lines{false};
  uint64_t epoch = 0;
  std::map<int, Clock> streams;
  // One clock for all threads of the host: that one thread waits for another is not seen here.
  Clock host;
  std::vector<std::string> races;
  std::set<std::string> seen;
};

State& state() {
  static State* state = new State;  // never destroyed: streams outlive static objects
  return *state;
}

constexpr size_t kMostRaces = 200;

std::string describe(const Access& access) {
  const auto& operation = *access.operation;
  return operation.name + (access.write ? " writes" : " reads") + " on " + operation.stream +
         (operation.line.empty() ? "" : ", queued at " + operation.line);
}

void report(const Access& before, const Access& now) {
  auto& races = state().races;
  std::string text = "race: " + describe(now) + "\n  is not ordered after: " + describe(before);
  if (races.size() < kMostRaces && state().seen.insert(text).second) races.push_back(text);
}

bool overlap(const Access& a, const Access& b) { return a.low < b.high && b.low < a.high; }

bool covers(const Access& a, const Access& b) { return a.low <= b.low && b.high <= a.high; }

}  // namespace

bool is_on() { return state().on; }
bool wants_lines() { return state().on && state().lines; }
uint64_t epoch() { return state().epoch; }

void set(bool on, bool lines) {
  auto& s = state();
  s.on = on;
  s.lines = lines;
  s.epoch++;
  s.streams.clear();
  s.host = Clock();
}

void tick(int stream) {
  auto& clock = state().streams[stream];
  clock.join(state().host);
  clock.set(stream, clock.at(stream) + 1);
}

const Clock& clock_of(int stream) { return state().streams[stream]; }

void join(int stream, const Clock& clock) { state().streams[stream].join(clock); }

void join_host(const Clock& clock) { state().host.join(clock); }

void access(int stream, History& history, size_t low, size_t high, bool write,
            const std::shared_ptr<const Operation>& operation) {
  const auto& clock = state().streams[stream];
  Access now{stream, clock.at(stream), low, high, write, operation};
  auto is_ordered = [&](const Access& before) { return clock.at(before.stream) >= before.time; };
  auto is_race = [&](const Access& before) {
    return (write || before.write) && overlap(before, now) && !is_ordered(before);
  };
  // One report is enough, and the latest access says most.
  auto race = std::find_if(history.rbegin(), history.rend(), is_race);
  if (race != history.rend()) report(*race, now);
  // What is ordered before this access, and weaker, cannot be in a conflict that this one is not.
  auto is_replaced = [&](const Access& before) {
    return (write || !before.write) && covers(now, before) && is_ordered(before);
  };
  history.erase(std::remove_if(history.begin(), history.end(), is_replaced), history.end());
  history.push_back(std::move(now));
}

void forget(History& history, const Clock& clock) {
  auto is_over = [&](const Access& access) { return clock.at(access.stream) >= access.time; };
  history.erase(std::remove_if(history.begin(), history.end(), is_over), history.end());
}

std::vector<std::string> races() { return state().races; }

void clear_races() {
  state().races.clear();
  state().seen.clear();
}

}  // namespace detector
}  // namespace sim
