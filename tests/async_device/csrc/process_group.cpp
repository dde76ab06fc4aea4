// Collectives for the device in NCCL's manner, and the functions that Python calls.
//
// A collective is enqueued: on a stream of the group's own, behind the current stream's work so far
// (`async_op=True`), or on the current stream. `Work::wait` makes the current stream wait; the host
// goes on. Collectives of one group run in the order in which they were issued, also on different
// streams. A CPU group (gloo) below carries the bytes, over the device's memory.
//
// Before each collective ranks compare what they are about to do. On NCCL ranks that disagree hang,
// or mix up bytes; here they fail, and the error names both collectives.
#include "runtime.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/functional.h>
#include <pybind11/stl.h>

namespace deferred {

void register_device();
at::Generator generator_of_device();

namespace {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

at::Tensor alias_for_jobs(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.device().type() == kType, "expected a tensor on the device, found one on ",
              tensor.device());
  TORCH_CHECK(tensor.is_contiguous(), "expected a contiguous tensor, found strides ",
              tensor.strides());
  return at::from_blob(for_jobs(tensor.data_ptr()), tensor.sizes(),
                       at::TensorOptions().dtype(tensor.dtype()));
}

Tensors aliases_for_jobs(const Tensors& tensors) {
  Tensors aliases;
  for (const auto& each : tensors) aliases.push_back(alias_for_jobs(each));
  return aliases;
}

std::vector<Tensors> aliases_for_jobs(const std::vector<Tensors>& lists) {
  std::vector<Tensors> aliases;
  for (const auto& each : lists) aliases.push_back(aliases_for_jobs(each));
  return aliases;
}

void add_all(Tensors& to, const Tensors& from) { to.insert(to.end(), from.begin(), from.end()); }
void add_all(Tensors& to, const std::vector<Tensors>& from) {
  for (const auto& each : from) add_all(to, each);
}

// What a rank is about to do, for comparison: sizes may differ by rank only in some collectives.
struct Fingerprint {
  std::string name;
  int64_t num_elements;  // -1: may differ
  at::ScalarType dtype;
};

// One collective, which the thread of its stream carries out. For a batch, all works of `start` are
// issued before any is waited for, so that sends and receives proceed together; then `finish` runs.
struct Carried {
  std::function<std::vector<WorkPtr>(c10d::Backend&)> start;
  std::function<void()> finish = [] {};
};

class DeferredWork final : public c10d::Work {
 public:
  DeferredWork(int rank, c10d::OpType type, CompletionPtr end, Tensors kept,
               c10::intrusive_ptr<c10::ivalue::Future> future, bool host_waits)
      : Work(rank, type), end_(std::move(end)), kept_(std::move(kept)),
        future_(std::move(future)), host_waits_(host_waits) {}

  bool isCompleted() override { return end_->is_done(); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    if (host_waits_) synchronize_completion(*end_, "barrier");
    return true;
  }
  void synchronize() override {
    wait_on_stream(current_stream(), end_, /*asked_for=*/true);
    kept_.clear();  // the current stream now waits, so the memory may be reused, as in NCCL's works
  }
  void blockCurrentStream() override { synchronize(); }
  Tensors result() override { return future_->value().toTensorVector(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  const CompletionPtr end_;
  Tensors kept_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  const bool host_waits_;
};

class DeferredGroup final : public c10d::Backend {
 public:
  DeferredGroup(BackendPtr below)
      : Backend(below->getRank(), below->getSize()), below_(std::move(below)),
        stream_(next_stream()) {}

  const std::string getBackendName() const override { return "deferred"; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override { below_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void abort() override { below_->abort(); }
  void shutdown() override { below_->shutdown(); }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto aliases = aliases_for_jobs(tensors);
    auto below = options;
    Carried carried;
    carried.start = [=](c10d::Backend& group) mutable {
      scale_before(options.reduceOp, aliases);
      below.reduceOp = op_below(options.reduceOp);
      std::vector<WorkPtr> works;
      for (auto& each : aliases) {
        Tensors one{each};
        works.push_back(group.allreduce(one, below));
      }
      return works;
    };
    carried.finish = [options, aliases, size = size_] {
      scale_after(options.reduceOp, aliases, size);
    };
    return issue(c10d::OpType::ALLREDUCE, "all_reduce", tensors, tensors, std::move(carried),
                 options.asyncOp);
  }

  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto start = [options, aliases = aliases_for_jobs(tensors)](c10d::Backend& group) mutable {
      return std::vector<WorkPtr>{group.broadcast(aliases, options)};
    };
    return issue(c10d::OpType::BROADCAST, "broadcast", tensors, tensors, {start}, options.asyncOp);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto aliases = aliases_for_jobs(tensors);
    auto below = options;
    Carried carried;
    carried.start = [=](c10d::Backend& group) mutable {
      scale_before(options.reduceOp, aliases);
      below.reduceOp = op_below(options.reduceOp);
      return std::vector<WorkPtr>{group.reduce(aliases, below)};
    };
    carried.finish = [options, aliases, size = size_] {
      scale_after(options.reduceOp, aliases, size);
    };
    return issue(c10d::OpType::REDUCE, "reduce", tensors, tensors, std::move(carried),
                 options.asyncOp);
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    auto start = [options, to = aliases_for_jobs(outputs),
                  from = aliases_for_jobs(inputs)](c10d::Backend& group) mutable {
      return std::vector<WorkPtr>{group.allgather(to, from, options)};
    };
    Tensors all = inputs;
    add_all(all, outputs);
    // Uneven shares are allowed, as on NCCL.
    return issue(c10d::OpType::ALLGATHER, "all_gather", all, outputs.at(0), {start},
                 options.asyncOp, /*is_even=*/false);
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return allgather_into_tensor_coalesced(outputs, inputs, options);
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    auto start = [options, to = aliases_for_jobs(outputs),
                  from = aliases_for_jobs(inputs)](c10d::Backend& group) mutable {
      std::vector<WorkPtr> works;
      for (size_t i = 0; i < to.size(); ++i) {
        works.push_back(group._allgather_base(to[i], from[i], options));
      }
      return works;
    };
    Tensors all = inputs;
    add_all(all, outputs);
    return issue(c10d::OpType::_ALLGATHER_BASE, "all_gather_single", all, outputs, {start},
                 options.asyncOp);
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(outputs.size() == 1 && inputs.size() == 1, "reduce_scatter: expected one output");
    // Shares may be uneven: each is reduced to the rank that keeps it.
    auto below = inputs_of_reduction(inputs[0]);
    auto to = alias_for_jobs(outputs[0]);
    Carried carried;
    carried.start = [=](c10d::Backend& group) mutable {
      for (auto& each : *below) each = each.clone();  // the caller's inputs are not written
      scale_before(options.reduceOp, *below);
      std::vector<WorkPtr> works;
      for (size_t root = 0; root < below->size(); ++root) {
        c10d::ReduceOptions reduce;
        reduce.reduceOp = op_below(options.reduceOp);
        reduce.rootRank = static_cast<int64_t>(root);
        Tensors one{(*below)[root]};
        works.push_back(group.reduce(one, reduce));
      }
      return works;
    };
    carried.finish = [options, below, to, rank = rank_, size = size_] {
      to.copy_((*below)[rank]);
      scale_after(options.reduceOp, {to}, size);
    };
    Tensors all = outputs;
    add_all(all, inputs);
    return issue(c10d::OpType::REDUCE_SCATTER, "reduce_scatter", all, outputs, std::move(carried),
                 options.asyncOp, /*is_even=*/false);
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    auto below = inputs_of_reduction(inputs);
    auto to = aliases_for_jobs(outputs);
    Carried carried;
    carried.start = [=](c10d::Backend& group) mutable {
      for (auto& each : *below) each = each.clone();
      scale_before(options.reduceOp, *below);
      auto sum = options;
      sum.reduceOp = op_below(options.reduceOp);
      std::vector<WorkPtr> works;
      for (size_t i = 0; i < to.size(); ++i) {
        works.push_back(group._reduce_scatter_base(to[i], (*below)[i], sum));
      }
      return works;
    };
    carried.finish = [options, to, size = size_] { scale_after(options.reduceOp, to, size); };
    Tensors all = inputs;
    add_all(all, outputs);
    return issue(c10d::OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_single", all, outputs,
                 std::move(carried), options.asyncOp);
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& options) override {
    auto start = [=, to = alias_for_jobs(output),
                  from = alias_for_jobs(input)](c10d::Backend& group) mutable {
      return std::vector<WorkPtr>{
          group.alltoall_base(to, from, output_sizes, input_sizes, options)};
    };
    return issue(c10d::OpType::ALLTOALL_BASE, "all_to_all_single", {input, output}, {output},
                 {start}, options.asyncOp, /*is_even=*/false);
  }

  // gloo has no all-to-all: each pair of ranks sends and receives.
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override {
    auto start = [to = aliases_for_jobs(outputs), from = aliases_for_jobs(inputs),
                  rank = rank_](c10d::Backend& group) mutable {
      std::vector<WorkPtr> works;
      for (int peer = 0; peer < static_cast<int>(to.size()); ++peer) {
        Tensors one_from{from[peer]}, one_to{to[peer]};
        if (peer == rank) {
          to[peer].copy_(from[peer]);
          continue;
        }
        works.push_back(group.send(one_from, peer, 0));
        works.push_back(group.recv(one_to, peer, 0));
      }
      return works;
    };
    Tensors all = inputs;
    add_all(all, outputs);
    return issue(c10d::OpType::ALLTOALL, "all_to_all", all, outputs, {start}, options.asyncOp,
                 /*is_even=*/false);
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    auto start = [options, to = aliases_for_jobs(outputs),
                  from = aliases_for_jobs(inputs)](c10d::Backend& group) mutable {
      return std::vector<WorkPtr>{group.gather(to, from, options)};
    };
    Tensors all = inputs;
    add_all(all, outputs);
    return issue(c10d::OpType::GATHER, "gather", all, outputs.empty() ? Tensors{} : outputs[0],
                 {start}, options.asyncOp, /*is_even=*/false);
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    auto start = [options, to = aliases_for_jobs(outputs),
                  from = aliases_for_jobs(inputs)](c10d::Backend& group) mutable {
      return std::vector<WorkPtr>{group.scatter(to, from, options)};
    };
    Tensors all = outputs;
    add_all(all, inputs);
    return issue(c10d::OpType::SCATTER, "scatter", all, outputs, {start}, options.asyncOp,
                 /*is_even=*/false);
  }

  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    auto start = [=, aliases = aliases_for_jobs(tensors)](c10d::Backend& group) mutable {
      return std::vector<WorkPtr>{group.send(aliases, peer, tag)};
    };
    return issue_to_peer(c10d::OpType::SEND, "send", tensors, peer, {start});
  }

  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    auto start = [=, aliases = aliases_for_jobs(tensors)](c10d::Backend& group) mutable {
      return std::vector<WorkPtr>{group.recv(aliases, peer, tag)};
    };
    return issue_to_peer(c10d::OpType::RECV, "recv", tensors, peer, {start});
  }

  // The host waits for it, as with NCCL.
  WorkPtr barrier(const c10d::BarrierOptions&) override {
    auto start = [](c10d::Backend& group) { return std::vector<WorkPtr>{group.barrier()}; };
    return issue(c10d::OpType::BARRIER, "barrier", {}, {}, {start}, /*is_async=*/true,
                 /*is_even=*/false, /*host_waits=*/true);
  }

  // Collectives issued before `endCoalescing` form one job, on the stream of the first one.
  void startCoalescing() override { batch_.emplace(); }
  WorkPtr endCoalescing() override {
    auto batch = std::exchange(batch_, std::nullopt);
    TORCH_CHECK(batch.has_value(), "endCoalescing: expected startCoalescing before it");
    return submit(c10d::OpType::COALESCED, "coalesced", *batch, main_, /*host_waits=*/false);
  }

 private:
  // The state of one ordered sequence: a communicator's collectives, or the messages with one peer.
  struct Channel {
    CompletionPtr last;
    c10::Stream stream;
  };

  struct Batch {
    std::vector<Carried> carried;
    std::vector<Fingerprint> fingerprints;  // empty if only two ranks take part
    Tensors kept;
    Tensors results;
    bool is_async = true;
  };

  static c10d::ReduceOp op_below(const c10d::ReduceOp& op) {
    const auto kind = static_cast<c10d::ReduceOp::RedOpType>(op);
    const bool scales = kind == c10d::ReduceOp::AVG || kind == c10d::ReduceOp::PREMUL_SUM;
    return scales ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
  }
  static void scale_before(const c10d::ReduceOp& op, Tensors& tensors) {
    if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return;
    // torch 2.11 has no other name for this class.
    const auto* factor = static_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
    TORCH_CHECK(!factor->tensor_factor.defined(), "PREMUL_SUM: expected a number as its factor");
    for (auto& each : tensors) each.mul_(factor->double_factor);
  }
  static void scale_after(const c10d::ReduceOp& op, const Tensors& tensors, int size) {
    if (op.op_ != c10d::ReduceOp::AVG) return;
    for (const auto& each : tensors) each.div_(size);
  }
  static std::shared_ptr<Tensors> inputs_of_reduction(const Tensors& inputs) {
    return std::make_shared<Tensors>(aliases_for_jobs(inputs));
  }

  WorkPtr issue(c10d::OpType type, const std::string& name, const Tensors& tensors,
                const Tensors& results, Carried carried, bool is_async, bool is_even = true,
                bool host_waits = false) {
    Batch own;
    Batch& batch = batch_.has_value() ? *batch_ : own;
    const int64_t length = is_even && !tensors.empty() ? tensors[0].numel() : -1;
    const auto dtype = tensors.empty() ? at::kByte : tensors[0].scalar_type();
    batch.carried.push_back(std::move(carried));
    batch.fingerprints.push_back({name, length, dtype});
    batch.is_async = is_async;
    add_all(batch.kept, tensors);
    add_all(batch.results, results);
    if (batch_.has_value()) return {};
    return submit(type, name, own, main_, host_waits);
  }

  WorkPtr issue_to_peer(c10d::OpType type, const std::string& name, const Tensors& tensors,
                        int peer, Carried carried) {
    Batch own;
    Batch& batch = batch_.has_value() ? *batch_ : own;
    batch.carried.push_back(std::move(carried));
    add_all(batch.kept, tensors);
    add_all(batch.results, tensors);
    if (batch_.has_value()) return {};
    auto found = peers_.find(peer);
    if (found == peers_.end()) found = peers_.emplace(peer, Channel{nullptr, next_stream()}).first;
    return submit(type, name, own, found->second, /*host_waits=*/false);
  }

  WorkPtr submit(c10d::OpType type, const std::string& name, const Batch& batch, Channel& channel,
                 bool host_waits) {
    const auto stream = batch.is_async ? channel.stream : current_stream();
    if (batch.is_async) wait_on_stream(stream, record(current_stream()), /*asked_for=*/false);
    wait_on_stream(stream, channel.last, /*asked_for=*/false);
    auto job = [group = below_, carried = batch.carried, fingerprints = batch.fingerprints,
                sequence = sequence_++]() mutable {
      for (const auto& each : fingerprints) compare(*group, each, sequence);
      std::vector<WorkPtr> works;
      for (auto& each : carried) {
        for (auto& work : each.start(*group)) works.push_back(std::move(work));
      }
      for (auto& work : works) work->wait();
      for (auto& each : carried) each.finish();
    };
    enqueue(stream, kCollective, name, std::move(job));
    channel.last = record(stream);
    // Callbacks of a future with devices run behind its events, on streams of torch's own.
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{the_device()});
    {
      c10::StreamGuard guard(stream);
      future->markCompleted(c10::IValue(batch.results));
    }
    return c10::make_intrusive<DeferredWork>(rank_, type, channel.last,
                                             batch.is_async ? batch.kept : Tensors{},
                                             std::move(future), host_waits);
  }

  static void compare(c10d::Backend& group, const Fingerprint& own, uint64_t sequence) {
    constexpr int64_t kLength = 64;
    std::string text = own.name + ", " + c10::toString(own.dtype);
    if (own.num_elements >= 0) text += ", " + std::to_string(own.num_elements) + " elements";
    text.resize(kLength, ' ');
    auto mine = at::from_blob(text.data(), {kLength}, at::kByte).clone();
    auto all = at::empty({group.getSize() * kLength}, at::kByte);
    group._allgather_base(all, mine)->wait();
    for (int rank = 0; rank < group.getSize(); ++rank) {
      const std::string other(all.data_ptr<uint8_t>() + rank * kLength,
                              all.data_ptr<uint8_t>() + (rank + 1) * kLength);
      TORCH_CHECK(other == text, "collective ", sequence, " of this group: rank ",
                  group.getRank(), " issued ", text.substr(0, text.find_last_not_of(' ') + 1),
                  "; rank ", rank, " issued ", other.substr(0, other.find_last_not_of(' ') + 1));
    }
  }

  const BackendPtr below_;
  const c10::Stream stream_;
  Channel main_{nullptr, stream_};
  std::map<int, Channel> peers_;
  std::optional<Batch> batch_;
  uint64_t sequence_ = 0;
};

BackendPtr make_group(const BackendPtr& below) {
  return c10::make_intrusive<DeferredGroup>(below);
}

// Calls Python in the thread that is about to wait.
void set_observer(std::optional<py::function> observer) {
  if (!observer.has_value()) return observe_host_syncs({});
  auto shared = std::shared_ptr<py::function>(
      new py::function(std::move(*observer)), [](py::function* function) {
        py::gil_scoped_acquire gil;
        delete function;
      });
  observe_host_syncs([shared](const std::string& reason) {
    py::gil_scoped_acquire gil;
    (*shared)(reason);
  });
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  register_device();
  m.def("make_group", &make_group);
  m.def("default_generator", &generator_of_device);
  m.def("set_observer", &set_observer);
  m.def("num_stream_waits", &num_stream_waits);
  m.def("drop_wait", &drop_wait);
  m.def("num_jobs", [](int64_t stream_id) {
    return num_jobs(c10::Stream(c10::Stream::UNSAFE, the_device(), stream_id));
  });
  m.def("set_delays", [](double compute, double copy, double collective, double host,
                         std::map<int64_t, double> by_stream, bool random, uint64_t seed) {
    set_delays({{compute, copy, collective}, host, std::move(by_stream), random, seed});
  });
  // A stream goes on when the host opens the gate: tests of order need no clock.
  py::class_<Completion, CompletionPtr>(m, "Gate").def("open", &Completion::set);
  m.def("close_gate", [](int64_t stream_id) {
    auto gate = std::make_shared<Completion>();
    const c10::Stream stream(c10::Stream::UNSAFE, the_device(), stream_id);
    wait_on_stream(stream, gate, /*asked_for=*/false);
    return gate;
  });
  m.def("synchronize", [](const std::string& reason) {
    py::gil_scoped_release no_gil;
    synchronize_device(reason);
  });
}

}  // namespace deferred
