#include "runtime.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <set>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace deferred {

// Objects that threads use are never destroyed: threads run until the process ends.
template <typename T>
T& immortal() {
  static T& object = *new T;
  return object;
}

// ---- Addresses ---------------------------------------------------------------------------------

namespace {

constexpr size_t kRegionBytes = size_t{1} << 36;  // reserved addresses; pages are taken on use

struct sigaction previous_handler;

// Says what went wrong, then lets the previous handler (Python's faulthandler, say) do its part.
void on_segmentation_fault(int, siginfo_t* info, void*) {
  if (is_device_address(info->si_addr)) {
    static const char message[] =
        "deferred: the host read or wrote device memory without a copy\n";
    [[maybe_unused]] auto written = write(STDERR_FILENO, message, sizeof(message) - 1);
  }
  sigaction(SIGSEGV, &previous_handler, nullptr);  // the repeated access then ends the process
}

struct Region {
  char* forbidden;
  char* allowed;
  size_t used = 0;

  Region() {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* first = mmap(nullptr, kRegionBytes, PROT_NONE, flags, -1, 0);
    void* second = mmap(nullptr, kRegionBytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    TORCH_CHECK(first != MAP_FAILED && second != MAP_FAILED, "deferred: no address space left");
    forbidden = static_cast<char*>(first);
    allowed = static_cast<char*>(second);
    struct sigaction action {};
    action.sa_sigaction = on_segmentation_fault;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, &previous_handler);
  }
};
Region& region() { return immortal<Region>(); }

}  // namespace

bool is_device_address(const void* address) {
  auto offset = static_cast<const char*>(address) - region().forbidden;
  return offset >= 0 && static_cast<size_t>(offset) < kRegionBytes;
}

void* for_jobs(const void* device_address) {
  if (device_address == nullptr) return nullptr;
  TORCH_CHECK(is_device_address(device_address), "deferred: not an address of the device");
  return region().allowed + (static_cast<const char*>(device_address) - region().forbidden);
}

// ---- Completion of work ------------------------------------------------------------------------

void Completion::set() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    done_ = true;
    time_ = std::chrono::steady_clock::now();
  }
  changed_.notify_all();
}

bool Completion::is_done() {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_;
}

void Completion::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return done_; });
}

std::chrono::steady_clock::time_point Completion::time() {
  std::lock_guard<std::mutex> lock(mutex_);
  return time_;
}

// ---- Delays, counters, planted defects ---------------------------------------------------------

namespace {

struct Settings {
  std::mutex mutex;
  Delays delays;
  std::function<void(const std::string&)> observer;
  int64_t dropped_wait = -1;
  uint64_t num_waits = 0;
  std::string error;  // of the first job that failed since an error was last raised
};
Settings& settings() { return immortal<Settings>(); }

void sleep_for(double seconds) {
  if (seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

// Uniform in [0, 1), the same for the same seed, stream and position (splitmix64), so that a run
// can be repeated whatever the threads do.
double draw(uint64_t seed, int64_t stream, uint64_t position) {
  uint64_t x = seed * 0x9E3779B97F4A7C15u + static_cast<uint64_t>(stream) * 0xD1B54A32D192ED03u +
      position * 0x8CB92BA72F3D8DD7u + 0x632BE59BD9B4E019u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return static_cast<double>((x ^ (x >> 31)) >> 11) * 0x1.0p-53;
}

double delay_of(Kind kind, int64_t stream, uint64_t position) {
  if (kind >= kNumDelayedKinds) return 0;
  std::lock_guard<std::mutex> lock(settings().mutex);
  const auto& delays = settings().delays;
  const auto own = delays.by_stream.find(stream);
  const double seconds = own != delays.by_stream.end() ? own->second : delays.seconds[kind];
  return delays.random ? seconds * draw(delays.seed, stream, position) : seconds;
}

void note_error(const std::string& name, const char* what) {
  std::lock_guard<std::mutex> lock(settings().mutex);
  if (settings().error.empty()) settings().error = name + " failed on the device: " + what;
}

void raise_error() {
  std::string error;
  {
    std::lock_guard<std::mutex> lock(settings().mutex);
    std::swap(error, settings().error);
  }
  TORCH_CHECK(error.empty(), error);
}

void tell_host_sync(const std::string& reason) {
  std::function<void(const std::string&)> observer;
  {
    std::lock_guard<std::mutex> lock(settings().mutex);
    observer = settings().observer;
  }
  if (observer) observer(reason);
}

}  // namespace

void set_delays(Delays delays) {
  std::lock_guard<std::mutex> lock(settings().mutex);
  settings().delays = std::move(delays);
}

void observe_host_syncs(std::function<void(const std::string&)> observer) {
  std::lock_guard<std::mutex> lock(settings().mutex);
  settings().observer = std::move(observer);
}

uint64_t num_stream_waits() {
  std::lock_guard<std::mutex> lock(settings().mutex);
  return settings().num_waits;
}

void drop_wait(int64_t index) {
  std::lock_guard<std::mutex> lock(settings().mutex);
  settings().dropped_wait = index;
  settings().num_waits = 0;
}

// ---- Streams -----------------------------------------------------------------------------------

namespace {
constexpr size_t kMostJobs = 1024;      // in a queue; then the host blocks
constexpr int64_t kNumPoolStreams = 32;  // as on CUDA
}  // namespace

class StreamQueue {
 public:
  explicit StreamQueue(int64_t id) : id_(id) {}

  void push(Kind kind, std::string name, std::function<void()> job, bool may_block) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!started_) {
      started_ = true;
      std::thread([this] { run(); }).detach();
    }
    if (may_block) changed_.wait(lock, [this] { return jobs_.size() < kMostJobs; });
    jobs_.push_back({kind, std::move(name), std::move(job)});
    ++num_pushed_;
    if (kind != kBookkeeping) ++num_delayed_;
    lock.unlock();
    changed_.notify_all();
  }

  // Number of jobs enqueued so far; `has_done(position)` says whether as many have ended.
  uint64_t position() {
    std::lock_guard<std::mutex> lock(mutex_);
    return num_pushed_;
  }
  // Number of kernels, copies and collectives among these jobs.
  uint64_t num_delayed() {
    std::lock_guard<std::mutex> lock(mutex_);
    return num_delayed_;
  }
  bool has_done(uint64_t position) {
    std::lock_guard<std::mutex> lock(mutex_);
    return num_done_ >= position;
  }
  void wait_for(uint64_t position) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return num_done_ >= position; });
  }

 private:
  struct Job {
    Kind kind;
    std::string name;
    std::function<void()> run;
  };

  void run() {
    at::set_num_threads(1);  // sums have one order, and streams share the cores
    for (uint64_t position = 0;; ++position) {
      Job job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return !jobs_.empty(); });
        job = std::move(jobs_.front());
        jobs_.pop_front();
      }
      changed_.notify_all();
      sleep_for(delay_of(job.kind, id_, position));
      try {
        job.run();
      } catch (const c10::Error& error) {
        note_error(job.name, error.what_without_backtrace());
      } catch (const std::exception& error) {
        note_error(job.name, error.what());
      }
      job = {};  // frees what the job holds before the job counts as done
      {
        std::lock_guard<std::mutex> lock(mutex_);
        ++num_done_;
      }
      changed_.notify_all();
    }
  }

  const int64_t id_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  uint64_t num_pushed_ = 0;
  uint64_t num_delayed_ = 0;
  uint64_t num_done_ = 0;
  bool started_ = false;
};

namespace {

struct Streams {
  std::vector<std::unique_ptr<StreamQueue>> queues;  // 0 is the default stream
  std::atomic<uint64_t> num_handed_out{0};
  Streams() {
    for (int64_t id = 0; id <= kNumPoolStreams; ++id) {
      queues.push_back(std::make_unique<StreamQueue>(id));
    }
  }
  std::vector<uint64_t> positions() {
    std::vector<uint64_t> all;
    for (auto& queue : queues) all.push_back(queue->position());
    return all;
  }
  bool have_done(const std::vector<uint64_t>& positions) {
    for (size_t i = 0; i < positions.size(); ++i) {
      if (!queues[i]->has_done(positions[i])) return false;
    }
    return true;
  }
};
Streams& streams() { return immortal<Streams>(); }

thread_local int64_t current_id = 0;

c10::Stream stream_with(int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, the_device(), id);
}

}  // namespace

StreamQueue& queue_of(const c10::Stream& stream) { return *streams().queues.at(stream.id()); }
c10::Stream default_stream() { return stream_with(0); }
c10::Stream current_stream() { return stream_with(current_id); }
c10::Stream next_stream() {
  return stream_with(static_cast<int64_t>(streams().num_handed_out++ % kNumPoolStreams) + 1);
}
c10::Stream exchange_stream(const c10::Stream& stream) {
  return stream_with(std::exchange(current_id, stream.id()));
}

void enqueue(const c10::Stream& stream, Kind kind, std::string name, std::function<void()> job) {
  raise_error();
  if (kind != kBookkeeping) {
    double host_seconds = 0;
    {
      std::lock_guard<std::mutex> lock(settings().mutex);
      host_seconds = settings().delays.host_seconds;
    }
    sleep_for(host_seconds);
  }
  queue_of(stream).push(kind, std::move(name), std::move(job), /*may_block=*/true);
}

CompletionPtr record(const c10::Stream& stream) {
  auto completion = std::make_shared<Completion>();
  queue_of(stream).push(kBookkeeping, "record", [completion] { completion->set(); }, false);
  return completion;
}

void wait_on_stream(const c10::Stream& stream, const CompletionPtr& completion, bool asked_for) {
  if (completion == nullptr) return;  // an event that was never recorded
  if (asked_for) {
    std::lock_guard<std::mutex> lock(settings().mutex);
    if (static_cast<int64_t>(settings().num_waits++) == settings().dropped_wait) return;
  }
  queue_of(stream).push(kBookkeeping, "wait", [completion] { completion->wait(); }, false);
}

uint64_t num_jobs(const c10::Stream& stream) { return queue_of(stream).num_delayed(); }

bool is_idle(const c10::Stream& stream) {
  auto& queue = queue_of(stream);
  return queue.has_done(queue.position());
}

void synchronize_stream(const c10::Stream& stream, const std::string& reason) {
  tell_host_sync(reason);
  auto& queue = queue_of(stream);
  queue.wait_for(queue.position());
  raise_error();
}

void synchronize_completion(Completion& completion, const std::string& reason) {
  tell_host_sync(reason);
  completion.wait();
  raise_error();
}

void synchronize_device(const std::string& reason) {
  tell_host_sync(reason);
  for (auto& queue : streams().queues) queue->wait_for(queue->position());
  raise_error();
}

// ---- Memory ------------------------------------------------------------------------------------
//
// The caching allocator's rules. A block belongs to the stream that was current when it was
// allocated. Only this stream can reuse the block, and at once after a free, since its own jobs run
// in order. Uses on other streams must be recorded by `record_stream`; the block is then reused
// only when they are done.
//
// The bytes of a new tensor are all ones (NaN in every floating dtype). A block is overwritten when
// it is allocated again, not when it is freed: until its own stream waits for other streams, they
// may still read it correctly. If all work that was enqueued before the free is done, the block is
// overwritten immediately, so that a stream that does not wait for the first write reads NaN and
// not an old value. Otherwise it is overwritten in its stream's order, like a first write by a
// kernel: a stream that still reads it, because `record_stream` or a wait is missing, reads NaN.

namespace {

constexpr size_t kGranularity = 512;

struct Block {
  char* address;
  size_t num_bytes;
  int64_t stream = 0;
  std::set<int64_t> other_streams;       // by record_stream, since it was taken
  std::vector<CompletionPtr> uses = {};  // of the other streams, since the free
  std::vector<uint64_t> freed_at = {};   // positions of all streams at the free

  bool is_used() {
    while (!uses.empty() && uses.back()->is_done()) uses.pop_back();
    return !uses.empty();
  }
};

using FreeBlocks = std::multimap<size_t, Block*>;

// The block of this size that was freed last: a program that reads freed memory most likely still
// reads this one.
Block* take_from(FreeBlocks& blocks, size_t num_bytes) {
  const auto [first, last] = blocks.equal_range(num_bytes);
  for (auto it = last; it != first;) {
    --it;
    if (it->second->is_used()) continue;
    Block* block = it->second;
    blocks.erase(it);
    return block;
  }
  return nullptr;
}

void free_device_block(void* context);

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    if (num_bytes == 0) return {nullptr, nullptr, &free_device_block, the_device()};
    const auto stream = current_stream();
    const size_t rounded = (num_bytes + kGranularity - 1) / kGranularity * kGranularity;
    std::lock_guard<std::mutex> lock(mutex_);
    Block* block = take_from(free_[stream.id()], rounded);
    if (block == nullptr) block = take_from(unowned_, rounded);
    if (block == nullptr) block = new_block(rounded);
    poison(*block, stream);
    block->stream = stream.id();
    stats_.allocated_bytes[0].increase(block->num_bytes);
    stats_.allocation[0].increase(1);
    return {block->address, block, &free_device_block, the_device()};
  }

  void free(Block* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.allocated_bytes[0].decrease(block->num_bytes);
    stats_.allocation[0].decrease(1);
    for (int64_t id : block->other_streams) block->uses.push_back(record(stream_with(id)));
    block->other_streams.clear();
    block->freed_at = streams().positions();
    free_[block->stream].emplace(block->num_bytes, block);
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (pointer.get_deleter() != &free_device_block || pointer.get_context() == nullptr) return;
    auto* block = static_cast<Block*>(pointer.get_context());
    std::lock_guard<std::mutex> lock(mutex_);
    if (stream.id() != block->stream) block->other_streams.insert(stream.id());
  }

  // As cudaFree does, it waits for the device; from then on any stream may take the blocks.
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    synchronize_device("empty_cache");
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [stream, blocks] : free_) {
      for (auto& [num_bytes, block] : blocks) {
        block->uses.clear();
        unowned_.emplace(num_bytes, block);
      }
      blocks.clear();
    }
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    enqueue(current_stream(), kCopy, "copy_data",
            [=] { std::memcpy(for_jobs(to), for_jobs(from), num_bytes); });
  }
  bool initialized() override { return true; }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.allocated_bytes[0].reset_accumulated();
    stats_.allocation[0].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.allocated_bytes[0].reset_peak();
    stats_.allocation[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return {kRegionBytes - region().used, kRegionBytes};
  }

 private:
  Block* new_block(size_t num_bytes) {
    auto& all = region();
    TORCH_CHECK(all.used + num_bytes <= kRegionBytes, "deferred: out of memory: expected ",
                num_bytes, " bytes, found ", kRegionBytes - all.used);
    auto* block = new Block{all.forbidden + all.used, num_bytes};
    all.used += num_bytes;
    stats_.reserved_bytes[0].increase(num_bytes);
    return block;
  }

  void poison(const Block& block, const c10::Stream& stream) {
    auto fill = [to = for_jobs(block.address), size = block.num_bytes] {
      std::memset(to, 0xFF, size);
    };
    if (streams().have_done(block.freed_at)) {
      fill();
    } else {
      queue_of(stream).push(kBookkeeping, "poison", fill, false);
    }
  }

  std::mutex mutex_;
  std::map<int64_t, FreeBlocks> free_;  // by stream
  FreeBlocks unowned_;
  c10::CachingDeviceAllocator::DeviceStats stats_;
};

DeviceMemory& memory() { return immortal<DeviceMemory>(); }

void free_device_block(void* context) {
  if (context != nullptr) memory().free(static_cast<Block*>(context));
}

struct PinnedMemory {
  std::mutex mutex;
  std::map<const char*, Block*> by_address;
  FreeBlocks free;

  Block* holding(const void* address) {
    auto it = by_address.upper_bound(static_cast<const char*>(address));
    if (it == by_address.begin()) return nullptr;
    Block* block = std::prev(it)->second;
    return static_cast<const char*>(address) < block->address + block->num_bytes ? block : nullptr;
  }
};
PinnedMemory& pinned() { return immortal<PinnedMemory>(); }

void free_pinned_block(void* context) {
  auto* block = static_cast<Block*>(context);
  if (block == nullptr) return;
  std::lock_guard<std::mutex> lock(pinned().mutex);
  pinned().free.emplace(block->num_bytes, block);
}

}  // namespace

c10::DeviceAllocator& device_memory() { return memory(); }

c10::DataPtr allocate_pinned(size_t num_bytes) {
  if (num_bytes == 0) return {nullptr, nullptr, &free_pinned_block, c10::kCPU};
  const size_t rounded = (num_bytes + kGranularity - 1) / kGranularity * kGranularity;
  std::lock_guard<std::mutex> lock(pinned().mutex);
  Block* block = take_from(pinned().free, rounded);
  if (block == nullptr) {
    block = new Block{static_cast<char*>(std::aligned_alloc(kGranularity, rounded)), rounded};
    TORCH_CHECK(block->address != nullptr, "deferred: no host memory for ", rounded, " bytes");
    pinned().by_address.emplace(block->address, block);
  }
  return {block->address, block, &free_pinned_block, c10::kCPU};
}

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> lock(pinned().mutex);
  return pinned().holding(address) != nullptr;
}

bool record_pinned(const void* address, const c10::Stream& stream) {
  std::lock_guard<std::mutex> lock(pinned().mutex);
  Block* block = pinned().holding(address);
  if (block == nullptr) return false;
  block->uses.push_back(record(stream));
  return true;
}

}  // namespace deferred
