// Streams: the threads that run kernels, the points in their queues, and waits.
#include "stream.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <Python.h>
#include <c10/util/Exception.h>
#include <c10/util/ParallelGuard.h>
#include <dlfcn.h>
#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <thread>

namespace sim {
namespace {

std::atomic<uint64_t> delay_seed{0}, delay_most{0}, delay_version{0};
std::atomic<bool> forked{false};
// Up to when the host knows that all it waited for is over.
std::atomic<Time> host_time{Time{0}};
// The time of the stream whose thread this is.
thread_local Time now{0};

std::mutex& order_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

// Streams live until the process ends: their threads may run longer than static objects live.
struct Devices {
  std::array<std::array<std::unique_ptr<Stream>, kStreams + 1>, kDevices> streams;
  std::array<std::atomic<unsigned>, kDevices> taken{};
  std::mutex errors_mutex;
  std::array<std::exception_ptr, kDevices> errors;

  Devices() {
    for (int device = 0; device < kDevices; device++)
      for (int id = 0; id <= kStreams; id++)
        streams[device][id] = std::make_unique<Stream>(device, id);
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
  }
};

Devices& devices() {
  static auto* devices = new Devices;
  return *devices;
}

void keep_error(int device, std::exception_ptr error) {
  std::lock_guard<std::mutex> lock(devices().errors_mutex);
  auto& kept = devices().errors[device];
  if (!kept) kept = error;
}

// Kernels of several streams run side by side already: none gets threads of its own. The setter of
// ATen is for all threads of the process, that of OpenMP for the calling one.
void use_one_thread() {
  using Setter = void (*)(int);
  if (auto set = reinterpret_cast<Setter>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"))) set(1);
}

Time computed() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + Time(time.tv_nsec);
}

struct Current {
  int device = 0;
  std::array<Stream*, kDevices> streams{};
};

thread_local Current current;

}  // namespace

Point::Point(const Stream& stream) : device(stream.device), stream(stream.number) {}

void Point::reach() {
  std::lock_guard<std::mutex> lock(mutex_);
  reached_ = true;
  time_ = now;
  changed_.notify_all();
}

void Point::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return reached_; });
}

void Point::wait_in_stream() {
  wait();
  now = std::max(now, time());
}

bool Point::is_reached() {
  std::lock_guard<std::mutex> lock(mutex_);
  return reached_;
}

Time Point::time() {
  std::lock_guard<std::mutex> lock(mutex_);
  return time_;
}

Stream::Stream(int device, int id)
    : device(device),
      id(id),
      number(device * (kStreams + 1) + id),
      name("sim:" + std::to_string(device) +
           (id == 0 ? " default stream" : " stream " + std::to_string(id))) {}

c10::Stream Stream::face() const {
  c10::Device face(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device));
  return c10::Stream(c10::Stream::UNSAFE, face, id);
}

void Stream::push(Task task, bool is_kernel) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!started_) {
    started_ = true;
    std::thread([this] { run(); }).detach();
  }
  queue_.push_back({std::move(task), is_kernel, host_time});
  changed_.notify_one();
}

bool Stream::is_started() {
  std::lock_guard<std::mutex> lock(mutex_);
  return started_;
}

bool Stream::is_idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return queue_.empty() && !busy_;
}

void Stream::run() {
  use_one_thread();
  c10::ParallelGuard serial(true);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::NoGradGuard no_grad;
  for (;;) {
    Entry next;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      busy_ = false;
      changed_.wait(lock, [this] { return !queue_.empty(); });
      busy_ = true;
      next = std::move(queue_.front());
      queue_.pop_front();
    }
    run(std::move(next));
  }
}

void Stream::run(Entry entry) {
  if (entry.is_kernel) delay();
  now = std::max(now, entry.queued);
  const Time before = computed();
  try {
    entry.task();
  } catch (...) {
    keep_error(device, std::current_exception());
  }
  if (entry.is_kernel) now += computed() - before;
}

void Stream::delay() {
  const uint64_t most = delay_most;
  if (most == 0) return;
  if (delays_ != delay_version) {
    delays_ = delay_version;
    random_.seed(delay_seed * 1000003 + number);
  }
  std::this_thread::sleep_for(std::chrono::microseconds(random_() % (most + 1)));
}

Order::Order() {
  TORCH_CHECK(!forked, "a forked process can not use 'sim' devices that its parent has used");
  lock_ = std::unique_lock<std::mutex>(order_mutex());
}

Released::Released() {
  if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
}

Released::~Released() {
  if (state_ != nullptr) PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
}

bool is_forked() { return forked; }

int current_device() { return current.device; }

int exchange_device(int device) {
  TORCH_CHECK(0 <= device && device < kDevices, "there is no device sim:", device, ", only sim:0 "
              "to sim:", kDevices - 1);
  return std::exchange(current.device, device);
}

Stream& default_stream(int device) { return *devices().streams.at(device)[0]; }

Stream& current_stream(int device) {
  Stream* stream = current.streams.at(device);
  return stream == nullptr ? default_stream(device) : *stream;
}

Stream& new_stream(int device) {
  return *devices().streams.at(device)[1 + devices().taken[device]++ % kStreams];
}

Stream& stream_of(const c10::Stream& face) {
  TORCH_CHECK(face.device_type() == c10::DeviceType::PrivateUse1, "not a stream of 'sim': ", face);
  return *devices().streams.at(face.device_index()).at(face.id());
}

void set_current(Stream& stream) { current.streams[stream.device] = &stream; }

PointPtr record_locked(Stream& stream) {
  auto point = std::make_shared<Point>(stream);
  if (detector::is_on()) {
    detector::tick(stream.number);
    point->clock = detector::clock_of(stream.number);
  }
  stream.push([point] { point->reach(); }, false);
  return point;
}

PointPtr record(Stream& stream) {
  Order order;
  return record_locked(stream);
}

void block(Stream& stream, PointPtr point) {
  Order order;
  if (detector::is_on()) detector::join(stream.number, point->clock);
  stream.push([point] { point->wait_in_stream(); }, false);
}

void throw_error(int device) {
  std::exception_ptr error;
  {
    std::lock_guard<std::mutex> lock(devices().errors_mutex);
    error = std::exchange(devices().errors.at(device), nullptr);
  }
  if (error) std::rethrow_exception(error);
}

namespace {

void tell_host(const PointPtr& point) {
  const Time time = point->time();
  for (Time known = host_time; known < time && !host_time.compare_exchange_weak(known, time);) {
  }
  if (!detector::is_on()) return;
  Order order;
  detector::join_host(point->clock);
}

// Waits, for a stream of which it is known that this ends.
void wait_for_end(Stream& stream) {
  auto point = record(stream);
  {
    Released released;
    point->wait();
  }
  tell_host(point);
}

}  // namespace

void wait(PointPtr point) {
  {
    Released released;
    point->wait();
  }
  tell_host(point);
  throw_error(point->device);
}

bool query(PointPtr point) {
  if (!point->is_reached()) return false;
  tell_host(point);
  return true;
}

void synchronize(Stream& stream) { wait(record(stream)); }

void synchronize_device(int device) {
  for (auto& stream : devices().streams.at(device)) {
    if (!stream->is_started()) continue;
    // Also one that is idle may have done something that the detector has not been told is over.
    wait_for_end(*stream);
  }
  throw_error(device);
}

bool query(Stream& stream) {
  if (!stream.is_idle()) return false;
  wait_for_end(stream);
  return true;
}

void set_delays(uint64_t seed, uint64_t most_microseconds) {
  delay_seed = seed;
  delay_most = most_microseconds;
  delay_version++;
}

void spend(std::chrono::microseconds time) {
  const Time before = computed();
  std::this_thread::sleep_for(time);
  now += time - (computed() - before);
}

}  // namespace sim
