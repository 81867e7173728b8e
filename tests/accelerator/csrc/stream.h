// Streams: queues of kernels, with a thread each that runs them later; and what waits for them.
//
// Time is that of the devices, as if each had a core for itself: a kernel takes as long as its
// thread computes, or as long as it is said to take, and begins when all that its stream waits for
// is over. The host takes no time; what it queues after a wait begins after what it waited for. So
// events tell the same on a busy machine as on an idle one.
#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>

#include "detector.h"

namespace sim {

constexpr int kDevices = 4;
// Per device, and the default stream besides. After so many, streams are handed out again.
constexpr int kStreams = 64;

using Task = std::function<void()>;
using Time = std::chrono::nanoseconds;

class Stream;

// A point in the queue of a stream, for which others may wait.
class Point {
 public:
  explicit Point(const Stream& stream);
  void reach();
  // By the host, or by a stream, which is as late then as the point.
  void wait();
  void wait_in_stream();
  bool is_reached();
  Time time();

  const int device, stream;
  Clock clock;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  Time time_{0};
};

using PointPtr = std::shared_ptr<Point>;

class Stream {
 public:
  Stream(int device, int id);
  // Kernels take time, and may be delayed; what belongs to events is not, and takes none. Call it
  // under the lock of Order.
  void push(Task task, bool is_kernel);
  bool is_started();
  bool is_idle();
  c10::Stream face() const;

  const int device, id;
  // Its place among the streams of all devices.
  const int number;
  const std::string name;

 private:
  struct Entry {
    Task task;
    bool is_kernel;
    Time queued;
  };

  void run();
  void run(Entry entry);
  void delay();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> queue_;
  bool busy_ = false;
  bool started_ = false;
  uint64_t delays_ = 0;
  std::mt19937_64 random_;
};

// Holds the lock under which everything is queued, so that the detector sees the queues' order.
// Whoever holds it must not wait, nor take the GIL.
class Order {
 public:
  Order();

 private:
  std::unique_lock<std::mutex> lock_;
};

// Lets go of Python's lock for as long as a wait takes, if this thread holds it.
class Released {
 public:
  Released();
  ~Released();

 private:
  void* state_ = nullptr;
};

// Whether this process is the fork of one that had streams. Their threads are not here.
bool is_forked();

int current_device();
int exchange_device(int device);
Stream& default_stream(int device);
Stream& current_stream(int device);
Stream& new_stream(int device);
Stream& stream_of(const c10::Stream& face);
void set_current(Stream& stream);

// `record_locked` is for those who hold the lock of Order already.
PointPtr record(Stream& stream);
PointPtr record_locked(Stream& stream);
void block(Stream& stream, PointPtr point);

// The host waits, and gets the first error of the device since the last time. Points are taken by
// value, as another thread may record the event again.
void wait(PointPtr point);
void synchronize(Stream& stream);
void synchronize_device(int device);
// Tells that all is over, in which case the host knows it, as after a wait.
bool query(Stream& stream);
bool query(PointPtr point);
void throw_error(int device);

// Tells, while the detector is on, whether all before one event is known to be over at another.
// Takes what `torch.Event.event_id` gives.
bool is_ordered(uintptr_t before, uintptr_t after);

// Before each kernel, its stream sleeps for up to so many microseconds, which are not counted.
void set_delays(uint64_t seed, uint64_t most_microseconds);
// Within a kernel: makes it take so much longer.
void spend(std::chrono::microseconds time);

}  // namespace sim
