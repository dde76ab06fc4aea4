// The device as torch sees it: guard, hooks, generator, operators.
//
// About ten operators are written here. All others go through one boxed fallback: the operator runs
// on meta tensors in the host, which gives shapes and finds the caller's mistakes at the call; then
// its CPU kernel is enqueued, over CPU tensors that alias the device's memory. Like kernels, jobs
// do not keep device memory alive, so that memory that is freed too early shows as an error.
#include "runtime.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/InferSize.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_map>

namespace deferred {

namespace {

bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

// A CPU tensor over the same bytes, for jobs. It owns nothing.
at::Tensor alias_for_jobs(const at::Tensor& tensor) {
  return at::from_blob(for_jobs(tensor.data_ptr()), tensor.sizes(), tensor.strides(),
                       at::TensorOptions().dtype(tensor.dtype()));
}

// ---- Guard -------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return the_device(); }
  c10::Device getDevice() const override { return the_device(); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "deferred: expected device 0, the only one; found ", device);
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return current_stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return default_stream(); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return next_stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return next_stream(); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  bool queryStream(const c10::Stream& stream) const override { return is_idle(stream); }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize_stream(stream, "Stream.synchronize");
  }
  void synchronizeDevice(c10::DeviceIndex) const override { synchronize_device("synchronize"); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    device_memory().recordStream(pointer, stream);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    static_cast<Event*>(*event)->recorded = deferred::record(stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      wait_on_stream(stream, static_cast<Event*>(event)->recorded, /*asked_for=*/true);
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || static_cast<Event*>(event)->recorded->is_done();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      synchronize_completion(*static_cast<Event*>(event)->recorded, "Event.synchronize");
    }
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    TORCH_CHECK(first != nullptr && second != nullptr && queryEvent(first) && queryEvent(second),
                "deferred: both events must be recorded and over");
    const std::chrono::duration<double, std::milli> elapsed =
        static_cast<Event*>(second)->recorded->time() -
        static_cast<Event*>(first)->recorded->time();
    return elapsed.count();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- Random numbers ----------------------------------------------------------------------------

// A seed and a count of draws, both in the host: each random operator takes one seed for its job.
struct Generator final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;

  Generator() : GeneratorImpl(the_device(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  uint64_t draw() {
    std::lock_guard<std::mutex> lock(mutex_);
    return seed_ * 0x9E3779B97F4A7C15u + ++offset_;
  }
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.dtype() == caffe2::TypeMeta::Make<uint8_t>(),
                "state of the generator: expected 16 bytes, found ", state.numel(), " elements");
    const auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0];
    offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, at::kByte, std::nullopt, at::kCPU, std::nullopt,
                                       std::nullopt);
    const uint64_t words[2] = {seed_, offset_};
    std::memcpy(state.data_ptr(), words, sizeof(words));
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator;
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
};

const at::Generator& default_generator() {
  static const auto& generator = *new at::Generator(at::make_generator<Generator>());
  return generator;
}

// ---- Hooks -------------------------------------------------------------------------------------

void resize_storage(const c10::Storage& storage, size_t num_bytes);

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t num_bytes) override { return allocate_pinned(num_bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    std::memcpy(to, from, num_bytes);
  }
  bool record_event(void* address, void*, c10::Stream stream) override {
    return record_pinned(address, stream);
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PinnedAllocator& pinned_allocator() {
  static auto& allocator = *new PinnedAllocator;
  return allocator;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    TORCH_CHECK(index <= 0, "deferred: expected device 0, the only one; found ", int{index});
  }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<Generator>();
  }
  c10::Device getDeviceFromPtr(void* data) const override {
    TORCH_CHECK(is_device_address(data), "deferred: not an address of the device");
    return the_device();
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    resize_storage(storage, num_bytes);
  }
};

// ---- Operators that are more than a CPU kernel -------------------------------------------------

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      sizes, strides, &device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(c10::get_default_dtype_as_scalartype()));
}

at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      sizes, &device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(c10::get_default_dtype_as_scalartype()), format);
}

void resize_storage(const c10::Storage& storage, size_t num_bytes) {
  const size_t kept = std::min(num_bytes, storage.nbytes());
  auto memory = device_memory().allocate(num_bytes);
  if (kept > 0) {
    enqueue(current_stream(), kCopy, "resize_",
            [to = for_jobs(memory.get()), from = for_jobs(storage.mutable_data()), kept] {
              std::memcpy(to, from, kept);
            });
  }
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(num_bytes);
}

void fit_storage(const at::Tensor& tensor) {
  const auto needed = static_cast<size_t>(at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.itemsize(), tensor.storage_offset()));
  if (needed > tensor.storage().nbytes()) resize_storage(tensor.storage(), needed);
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef sizes,
                          std::optional<at::MemoryFormat> format) {
  if (self.sizes() != sizes) self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  if (format.has_value()) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  fit_storage(self);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage storage, int64_t offset,
                        c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  at::native::checkSetStorage(self, std::move(storage), offset, sizes, strides);
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_offset(offset);
  if (strides.data() == nullptr) {
    tensor->set_sizes_contiguous(sizes);
  } else {
    tensor->set_sizes_and_strides(sizes, strides);
  }
  fit_storage(self);
  return self;
}
at::Tensor& set_whole_storage(at::Tensor& self, c10::Storage storage) {
  const auto length = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, length, {});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  if (self.is_same(source)) return self;
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(),
                     source.strides());
}
at::Tensor& set_nothing(at::Tensor& self) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, device_memory().allocate(0),
                       &device_memory(), /*resizable=*/true);
  return set_storage(self, std::move(storage), 0, {0}, {});
}

// Copies between pinned memory and the device run on the stream if the caller says `non_blocking`.
// For other host memory, and without `non_blocking`, the host waits.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  const auto stream = current_stream();
  const at::Tensor* host = is_ours(self) ? (is_ours(dst) ? nullptr : &dst) : &self;
  const bool returns_at_once =
      host == nullptr || (non_blocking && is_pinned(host->data_ptr()));
  auto alias = [](const at::Tensor& tensor) {
    return is_ours(tensor) ? alias_for_jobs(tensor)
                           : at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                                           at::TensorOptions().dtype(tensor.dtype()));
  };
  enqueue(stream, kCopy, "copy_", [from = alias(self), to = alias(dst)]() mutable {
    at::NoGradGuard guard;
    to.copy_(from);
  });
  // The allocator of pinned memory, not the job, keeps `host` from reuse until the copy is done.
  // The host may still overwrite it.
  if (host != nullptr && returns_at_once) record_pinned(host->data_ptr(), stream);
  if (!returns_at_once) synchronize_stream(stream, is_ours(self) ? "copy to host" : "copy from host");
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

at::Scalar item(const at::Tensor& self) {
  synchronize_stream(current_stream(), "item");
  return alias_for_jobs(self).item();
}

// CPU's kernel takes no generator.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p,
                                                  std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, at::kBool)};
  auto mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0 : 1 / (1 - p)), mask};
}

void record_stream(at::Tensor& self, at::Stream stream) {
  device_memory().recordStream(self.storage().data_ptr(), stream);
}

// ---- Fallback ----------------------------------------------------------------------------------

using Replace = std::function<at::Tensor(const at::Tensor&)>;

// `value` with each tensor in it replaced.
c10::IValue map_tensors(const c10::IValue& value, const Replace& replace) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? c10::IValue(replace(value.toTensor())) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) list.push_back(replace(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& each : value.toOptionalTensorVector()) {
      list.push_back(each.has_value() && each->defined() ? std::make_optional(replace(*each)) : each);
    }
    return list;
  }
  return value;
}

c10::IValue on_device_type(const c10::IValue& value, c10::DeviceType type) {
  const bool moves = value.isDevice() && value.toDevice().type() == kType;
  return moves ? c10::IValue(c10::Device(type)) : value;
}

struct TensorShape {
  bool defined = false;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::kFloat;
};

// What meta tensors say about a call.
struct CallShapes {
  bool known = true;                             // the operator has a meta kernel
  std::vector<std::vector<TensorShape>> results;  // shapes of each new result
  std::vector<std::pair<size_t, std::vector<int64_t>>> resized;  // arguments, and their new sizes
};

template <typename T>
void append(std::string& key, const T& value) {
  key.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// Appends everything that shapes may depend on to `key`. Returns whether the type of `value` is
// known.
bool append_value(std::string& key, const c10::IValue& value) {
  auto append_tensor = [&key](const at::Tensor& tensor) {
    key += tensor.defined() ? 'T' : 'U';
    if (!tensor.defined()) return;
    append(key, tensor.device().type());
    append(key, tensor.scalar_type());
    append(key, tensor.unsafeGetTensorImpl()->is_wrapped_number());
    append(key, tensor.dim());
    for (int64_t size : tensor.sizes()) append(key, size);
    for (int64_t stride : tensor.strides()) append(key, stride);
  };
  if (value.isTensor()) {
    append_tensor(value.toTensor());
  } else if (value.isTensorList()) {
    key += 'L';
    for (const at::Tensor& each : value.toTensorVector()) append_tensor(each);
    key += ']';
  } else if (value.isOptionalTensorList()) {
    key += 'O';
    for (const auto& each : value.toOptionalTensorVector()) append_tensor(each.value_or(at::Tensor()));
    key += ']';
  } else if (value.isInt()) {
    append(key += 'i', value.toInt());
  } else if (value.isDouble()) {
    append(key += 'd', value.toDouble());
  } else if (value.isBool()) {
    append(key += 'b', value.toBool());
  } else if (value.isIntList()) {
    key += 'I';
    for (int64_t each : value.toIntVector()) append(key, each);
    key += ']';
  } else if (value.isString()) {
    key += 's' + value.toStringRef() + ']';
  } else if (value.isDevice() || value.isNone() || value.isGenerator()) {
    key += value.isNone() ? 'N' : 'G';
  } else {
    return false;
  }
  return true;
}

at::Tensor meta_of(const at::Tensor& tensor) {
  // A CPU tensor without dimensions is a number; meta kernels take those.
  if (!is_ours(tensor) && tensor.dim() == 0) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(),
                           at::TensorOptions().dtype(tensor.dtype()).device(at::kMeta));
}

TensorShape shape_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {true, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()};
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

std::vector<at::Tensor> tensors_of(const c10::IValue& value) {
  return value.isTensor() ? std::vector<at::Tensor>{value.toTensor()} : value.toTensorVector();
}

// Sets the dtype of the mean and deviation of layer and group norm. The meta kernels return fp32,
// as CUDA's do. CPU kernels return the dtype of the input, unless the weight is wider.
void set_dtype_of_statistics(const std::string& name, c10::ArrayRef<c10::IValue> arguments,
                             CallShapes& shapes) {
  const bool is_layer_norm = name == "aten::native_layer_norm";
  if (!is_layer_norm && name != "aten::native_group_norm") return;
  const auto input = arguments[0].toTensor().scalar_type();
  const auto& weight = arguments[is_layer_norm ? 2 : 1];
  const bool is_wider = weight.isTensor() && weight.toTensor().defined() &&
      weight.toTensor().scalar_type() != input;
  for (size_t i = 1; i < 3; ++i) shapes.results[i][0].dtype = is_wider ? at::kFloat : input;
}

CallShapes run_on_meta(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  CallShapes shapes;
  torch::jit::Stack stack;
  std::vector<std::pair<size_t, at::Tensor>> written;
  const auto& schema = op.schema();
  for (size_t i = 0; i < arguments.size(); ++i) {
    stack.push_back(on_device_type(map_tensors(arguments[i], meta_of), c10::kMeta));
    if (arguments[i].isGenerator()) stack.back() = c10::IValue();
    if (is_written(schema.arguments()[i]) && stack.back().isTensor()) {
      written.emplace_back(i, stack.back().toTensor());
    }
  }
  try {
    op.callBoxed(&stack);
  } catch (const c10::NotImplementedError&) {
    shapes.known = false;
    return shapes;
  }
  for (const auto& [i, tensor] : written) {
    if (tensor.defined() && tensor.sizes() != arguments[i].toTensor().sizes()) {
      shapes.resized.emplace_back(i, tensor.sizes().vec());
    }
  }
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    if (is_written(schema.returns()[i])) continue;
    shapes.results.emplace_back();
    for (const auto& each : tensors_of(stack[i])) shapes.results.back().push_back(shape_of(each));
  }
  set_dtype_of_statistics(schema.name(), arguments, shapes);
  return shapes;
}

// A meta kernel in Python takes a quarter of a millisecond, so the shapes of calls are cached.
CallShapes shapes_of_call(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  static auto& known = *new std::unordered_map<std::string, CallShapes>;
  static auto& mutex = *new std::mutex;
  std::string key;
  append(key, &op.schema());
  append(key, c10::get_default_dtype_as_scalartype());
  bool can_keep = true;
  for (const auto& each : arguments) can_keep = append_value(key, each) && can_keep;
  if (can_keep) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = known.find(key);
    if (found != known.end()) return found->second;
  }
  auto shapes = run_on_meta(op, arguments);
  if (can_keep) {
    std::lock_guard<std::mutex> lock(mutex);
    known.emplace(std::move(key), shapes);
  }
  return shapes;
}

at::Tensor empty_like_shape(const TensorShape& shape) {
  if (!shape.defined) return {};
  return empty_strided(shape.sizes, shape.strides, shape.dtype, {}, {}, {});
}

// What the CPU kernel is called with. Host tensors are copied now, as CUDA copies a kernel's arguments:
// the host may change them as soon as the call has returned.
torch::jit::Stack arguments_for_job(const c10::OperatorHandle& op,
                                    c10::ArrayRef<c10::IValue> arguments) {
  torch::jit::Stack stack;
  const bool is_random = op.hasTag(at::Tag::nondeterministic_seeded);
  bool is_seeded = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto value = map_tensors(arguments[i], [](const at::Tensor& tensor) {
      return is_ours(tensor) ? alias_for_jobs(tensor) : tensor.clone();
    });
    value = on_device_type(value, c10::kCPU);
    const auto type = op.schema().arguments()[i].type();
    if (value.isGenerator() || (is_random && type->str().find("Generator") != std::string::npos)) {
      auto generator = value.isGenerator() ? value.toGenerator() : default_generator();
      TORCH_CHECK(generator.device().type() == kType, op.schema().name(),
                  ": expected a generator of the device, found one of ", generator.device());
      value = at::detail::createCPUGenerator(generator.get<Generator>()->draw());
      is_seeded = true;
    }
    stack.push_back(std::move(value));
  }
  TORCH_CHECK_NOT_IMPLEMENTED(!is_random || is_seeded, op.schema().operator_name(),
                              ": the device has no random operators that take no generator");
  return stack;
}

// Calls the CPU kernel directly, below autograd, which has recorded the call already.
void call_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView guard;
  op.callBoxed(stack);
}

// For operators whose results the host must know, or that say nothing about their shapes: the host
// waits for the stream, and runs the kernel itself.
void run_in_host(const c10::OperatorHandle& op, torch::jit::Stack* stack,
                 c10::ArrayRef<c10::IValue> arguments) {
  synchronize_stream(current_stream(), op.schema().name());
  auto results = arguments_for_job(op, arguments);
  call_cpu(op, &results);
  const auto& schema = op.schema();
  torch::jit::Stack returned;
  for (size_t i = 0; i < results.size(); ++i) {
    if (is_written(schema.returns()[i])) {
      for (size_t j = 0; j < arguments.size(); ++j) {
        const auto* alias = schema.arguments()[j].alias_info();
        if (alias != nullptr && *alias == *schema.returns()[i].alias_info()) {
          returned.push_back(arguments[j]);
        }
      }
      continue;
    }
    returned.push_back(map_tensors(results[i], [](const at::Tensor& result) {
      auto tensor = empty_like_shape(shape_of(result));
      alias_for_jobs(tensor).copy_(result);
      return tensor;
    }));
  }
  torch::jit::drop(*stack, arguments.size());
  for (auto& each : returned) stack->push_back(std::move(each));
}

bool is_known_by_values_only(const c10::OperatorHandle& op) {
  if (op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output)) {
    return true;
  }
  for (const auto& each : op.schema().returns()) {
    const auto kind = each.type()->kind();
    if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) return true;
  }
  return false;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::vector<c10::IValue> arguments(stack->end() - schema.arguments().size(), stack->end());
  for (const auto& each : schema.returns()) {
    TORCH_CHECK_NOT_IMPLEMENTED(each.alias_info() == nullptr || each.alias_info()->isWrite(),
                                op.schema().operator_name(), ": a view that the device does not have");
  }
  if (is_known_by_values_only(op)) return run_in_host(op, stack, arguments);

  at::AutoDispatchBelowADInplaceOrView guard;
  const auto shapes = shapes_of_call(op, arguments);
  bool has_new_results = false;
  for (const auto& each : schema.returns()) has_new_results |= !is_written(each);
  if (!shapes.known && has_new_results) return run_in_host(op, stack, arguments);
  for (const auto& [i, sizes] : shapes.resized) resize_(arguments[i].toTensor(), sizes, {});

  std::vector<c10::IValue> returned;
  std::vector<at::Tensor> outputs;  // aliases, in the order of the new results
  auto known = shapes.results.begin();
  for (const auto& each : schema.returns()) {
    if (is_written(each)) {
      for (size_t j = 0; j < arguments.size(); ++j) {
        const auto* alias = schema.arguments()[j].alias_info();
        if (alias != nullptr && *alias == *each.alias_info()) returned.push_back(arguments[j]);
      }
      continue;
    }
    c10::List<at::Tensor> list;
    for (const auto& shape : *known++) {
      list.push_back(empty_like_shape(shape));
      const at::Tensor tensor = list.get(list.size() - 1);
      outputs.push_back(tensor.defined() ? alias_for_jobs(tensor) : tensor);
    }
    if (each.type()->kind() == c10::TypeKind::TensorType) {
      returned.emplace_back(list.get(0));
    } else {
      returned.emplace_back(list);
    }
  }
  auto job = [op, operands = arguments_for_job(op, arguments), outputs]() mutable {
    call_cpu(op, &operands);
    size_t next = 0;
    for (size_t i = 0; i < operands.size(); ++i) {
      if (is_written(op.schema().returns()[i])) continue;
      for (const auto& result : tensors_of(operands[i])) {
        auto& output = outputs.at(next++);
        if (!output.defined()) continue;
        TORCH_CHECK(result.sizes() == output.sizes() && result.dtype() == output.dtype(),
                    "meta kernel and CPU kernel disagree: ", output.dtype(), output.sizes(), ", ",
                    result.dtype(), result.sizes());
        output.copy_(result);
      }
    }
  };
  enqueue(current_stream(), kCompute, schema.name(), std::move(job));
  torch::jit::drop(*stack, arguments.size());
  for (auto& each : returned) stack->push_back(std::move(each));
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("native_dropout", native_dropout);
  m.impl("record_stream", record_stream);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  // torch has composite kernels of these operators, which it would call. Those of convolutions
  // choose a backend by device and have none for this one. Those of norms round differently from
  // the CPU kernels. That of mse_loss passes an output to the CPU kernel, which resizes it
  // temporarily; jobs cannot resize.
  for (const char* name : {"convolution", "convolution_backward", "native_layer_norm",
                           "native_group_norm", "mse_loss"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  // torch's composites of these call a kernel for each tensor. Here, as on CUDA, one kernel handles
  // all tensors.
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames()) {
    if (op.name.rfind("aten::_foreach_", 0) != 0) continue;
    const auto name = op.name + (op.overload_name.empty() ? "" : "." + op.overload_name);
    m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

// Once, when Python loads the module.
void register_device() {
  c10::SetAllocator(kType, &device_memory());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  at::setHostAllocator(kType, &pinned_allocator());
}
at::Generator generator_of_device() { return default_generator(); }

}  // namespace deferred
