// The device without torch's operators: its memory, streams, events, delays and counters.
//
// Everything in here is about order. A stream is a thread that takes jobs from a queue; the host
// enqueues and goes on. Only events order one stream after another, and only the functions whose
// names begin with `synchronize` make the host wait.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace deferred {

constexpr auto kType = c10::DeviceType::PrivateUse1;
inline c10::Device the_device() { return {kType, 0}; }

// ---- Addresses ---------------------------------------------------------------------------------
//
// Device memory has two addresses. Tensors hold the first, at which no access is allowed: a host
// that peeks ends with SIGSEGV and a line that says so. Jobs add a constant to get the second, at
// which the bytes are. (Protection keys, which are per thread, are not on every machine.)
bool is_device_address(const void* address);
void* for_jobs(const void* device_address);  // nullptr stays nullptr

// ---- Completion of work ------------------------------------------------------------------------

class Completion {
 public:
  void set();
  bool is_done();
  void wait();
  // The time at which `set` was called. Call it only after that.
  std::chrono::steady_clock::time_point time();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::chrono::steady_clock::time_point time_;
};
using CompletionPtr = std::shared_ptr<Completion>;

// What torch holds as an event: the completion that the last `record` made.
struct Event {
  CompletionPtr recorded;
};

// ---- Streams -----------------------------------------------------------------------------------

enum Kind { kCompute, kCopy, kCollective, kNumDelayedKinds, kBookkeeping = kNumDelayedKinds };

class StreamQueue;
StreamQueue& queue_of(const c10::Stream& stream);
c10::Stream default_stream();
c10::Stream current_stream();  // of this thread
c10::Stream exchange_stream(const c10::Stream& stream);
c10::Stream next_stream();  // from a pool that is handed out in turn, as CUDA's is

// Enqueues `job`. Blocks while the queue is full, as CUDA does. Raises the error of an earlier job
// that failed. `name` stands for this job in error messages.
void enqueue(const c10::Stream& stream, Kind kind, std::string name, std::function<void()> job);

// A completion of all work enqueued on `stream` so far. Does not raise: frees of memory call it.
CompletionPtr record(const c10::Stream& stream);
// Work enqueued on `stream` after this call runs after `completion`. Waits that a program requests
// are counted, and can be dropped (`drop_wait`); waits of the device itself are not counted and
// cannot be dropped.
void wait_on_stream(const c10::Stream& stream, const CompletionPtr& completion, bool asked_for);
bool is_idle(const c10::Stream& stream);
// Number of kernels, copies and collectives enqueued on `stream` so far.
uint64_t num_jobs(const c10::Stream& stream);

// The host waits. `reason` goes to the observer of host syncs.
void synchronize_stream(const c10::Stream& stream, const std::string& reason);
void synchronize_completion(Completion& completion, const std::string& reason);
void synchronize_device(const std::string& reason);

// ---- Delays, counters, planted defects ---------------------------------------------------------

struct Delays {
  std::array<double, kNumDelayedKinds> seconds{};  // before each job of a kind
  double host_seconds = 0;                         // before each enqueued job, in the host
  std::map<int64_t, double> by_stream;             // in place of `seconds`, by stream id
  bool random = false;  // delays are uniform from 0 to these seconds; see `draw`
  uint64_t seed = 0;
};
void set_delays(Delays delays);

// Before a thread waits, it calls `observer(reason)`. Pass an empty function to stop this.
void observe_host_syncs(std::function<void(const std::string&)> observer);

uint64_t num_stream_waits();
// Leaves out the wait with this number, counted from now; -1: none. Resets the counter.
void drop_wait(int64_t index);

// ---- Memory ------------------------------------------------------------------------------------

c10::DeviceAllocator& device_memory();
// Host memory that streams copy from and to without blocking the host.
c10::DataPtr allocate_pinned(size_t num_bytes);
bool is_pinned(const void* address);
// Pinned memory at `address` is not handed out again before `stream` is done with it. The host may
// overwrite it at any time, as it may on CUDA.
bool record_pinned(const void* address, const c10::Stream& stream);

}  // namespace deferred
