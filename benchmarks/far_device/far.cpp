// A device for torch whose memory is this machine's and whose kernels are the CPU's, but which torch
// and every program take for a device of its own: what this is for, __init__.py says.
//
// Tensors of the device `far` hold their bytes in ordinary memory. An operation on them sees the
// same bytes as CPU tensors, runs the CPU's kernel and hands its results back as far ones, after it
// has looked whether a GPU would have refused: a GPU does not read the CPU's tensors. Each is
// counted by its name.

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <mutex>

// Of <ATen/autocast_mode.h>, which takes as long to compile as all the rest.
namespace at::autocast {
TORCH_API ScalarType get_autocast_dtype(DeviceType device);
TORCH_API Tensor cached_cast(ScalarType to, const Tensor& tensor, c10::DeviceType device);
}  // namespace at::autocast

namespace {

using at::IntArrayRef;
using at::Tensor;
constexpr auto FAR = c10::DeviceType::PrivateUse1;
constexpr auto CPU = c10::DeviceType::CPU;
const c10::DispatchKeySet FAR_KEYS(c10::DispatchKey::PrivateUse1);

// What the device was asked for -------------------------------------------------------------------

std::mutex counting;  // a backward pass has a thread of its own for each device
c10::Dict<std::string, int64_t> counts;

void count(const std::string& what) {
  std::lock_guard<std::mutex> held(counting);
  counts.insert_or_assign(what, (counts.contains(what) ? counts.at(what) : 0) + 1);
}

c10::Dict<std::string, int64_t> take_counts() {
  std::lock_guard<std::mutex> held(counting);
  auto taken = counts.copy();
  counts.clear();
  return taken;
}

// The device: one, with one stream on which everything is done at once -------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream only() { return c10::Stream(c10::Stream::DEFAULT, {FAR, 0}); }
  c10::DeviceType type() const override { return FAR; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Device exchangeDevice(c10::Device) const override { return {FAR, 0}; }
  c10::Device getDevice() const override { return {FAR, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override { return only(); }
  c10::Stream getDefaultStream(c10::Device) const override { return only(); }
  c10::Stream getNewStream(c10::Device, int) const override { return only(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return only(); }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    *event = nullptr;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  bool isPinnedPtr(const void*) const override { return false; }
};
const bool hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto given = c10::GetCPUAllocator()->allocate(bytes);
    void* data = given.get();
    auto deleter = given.get_deleter();
    return {data, given.release_context(), deleter, {FAR, 0}};
  }
  c10::DeleterFnPtr raw_deleter() const override { return c10::GetCPUAllocator()->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};
Memory memory;
REGISTER_ALLOCATOR(FAR, &memory);

// The same bytes, as a tensor of the other device ------------------------------------------------

Tensor as_on(c10::DeviceType type, const Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() == type) return tensor;
  const bool far = type == FAR;
  auto* kept = new c10::Storage(tensor.storage());  // as long as the other tensor lives
  c10::DataPtr data(kept->mutable_data(), kept,
                    [](void* storage) { delete static_cast<c10::Storage*>(storage); },
                    far ? c10::Device(FAR, 0) : c10::Device(CPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), kept->nbytes(), std::move(data),
                       far ? &memory : c10::GetCPUAllocator(), /*resizable=*/true);
  auto other = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), far ? FAR_KEYS : c10::DispatchKeySet(c10::DispatchKey::CPU),
      tensor.dtype());
  auto* impl = other.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return other;
}
Tensor near(const Tensor& tensor) { return as_on(CPU, tensor); }
Tensor far(const Tensor& tensor) { return as_on(FAR, tensor); }

// An operation that was resized its result: the far tensor follows.
void follow(const Tensor& ours, const Tensor& theirs) {
  if (ours.sizes() == theirs.sizes()) return;
  auto* impl = ours.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(far(theirs).storage());
  impl->set_sizes_and_strides(theirs.sizes(), theirs.strides(), theirs.storage_offset());
}

// Any operation ---------------------------------------------------------------------------------

// A GPU takes the CPU's row numbers, and numbers without dimensions.
bool takes_rows_by_the_cpu(const std::string& name) {
  return name.find("aten::index.") == 0 || name.find("aten::index_put") == 0 ||
      name.find("aten::_index_put") == 0;
}

void by_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto name = c10::toString(op.operator_name());
  const size_t arguments = schema.arguments().size(), first = stack->size() - arguments;
  count(name);
  std::vector<Tensor> given(arguments);
  auto read = [&](const Tensor& tensor, bool rows) {
    const bool foreign = tensor.defined() && tensor.device().is_cpu() && tensor.dim() > 0;
    TORCH_CHECK(!foreign || (rows && takes_rows_by_the_cpu(name)),
                "Expected all tensors to be on the same device: ", name,
                " on a far device was given one of the cpu");
    // Before it picks rows torch has taken their numbers to the device; before it puts some, not.
    if (foreign && name.find("index_put") != std::string::npos) count("to");
    // How many rows a mask picks only the device knows.
    if (rows && !foreign && tensor.scalar_type() == at::kBool) count("aten::nonzero");
    return near(tensor);
  };
  for (size_t i = 0; i < arguments; ++i) {
    auto& value = (*stack)[first + i];
    if (value.isTensor()) {
      given[i] = value.toTensor();
      value = read(given[i], false);
    } else if (value.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(read(tensor, false));
      value = c10::List<Tensor>(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
        list.push_back(tensor ? std::optional(read(*tensor, true)) : std::nullopt);
      }
      value = list;
    } else if (value.isDevice()) {
      value = c10::Device(CPU);
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  const auto& returns = schema.returns();
  for (size_t i = 0; i < returns.size(); ++i) {
    auto& value = (*stack)[stack->size() - returns.size() + i];
    if (value.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(far(tensor));
      value = c10::List<Tensor>(list);
    }
    if (!value.isTensor()) continue;
    Tensor result;
    const auto* written = returns[i].alias_info();
    for (size_t a = 0; written && written->isWrite() && a < arguments; ++a) {
      const auto* mine = schema.arguments()[a].alias_info();
      if (mine && *mine == *written && given[a].defined()) result = given[a];
    }
    if (result.defined()) follow(result, value.toTensor());
    value = result.defined() ? result : far(value.toTensor());
  }
}

auto boxed() { return torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>(); }

// What torch wants of each device by itself -----------------------------------------------------

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, FAR_KEYS, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, FAR_KEYS,
                                           c10::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool) {
  count(self.device() == to.device() ? "aten::copy_" : to.device().is_cpu() ? "from" : "to");
  near(to).copy_(near(self));
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  return copy_from(self, to, false);
}

Tensor& set_part(Tensor& self, at::Storage source, int64_t offset, IntArrayRef size,
                 IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

Tensor& set_whole(Tensor& self, at::Storage source) {
  const auto numbers = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_part(self, std::move(source), 0, {numbers}, {1});
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                   IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool transposed,
                   IntArrayRef output_padding, int64_t groups) {
  count("aten::convolution");
  TORCH_CHECK(input.device() == weight.device(), "Expected all tensors to be on the same device");
  return far(at::convolution(near(input), near(weight),
                             bias ? std::optional(near(*bias)) : std::nullopt, stride, padding,
                             dilation, transposed, output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& input, const Tensor& weight, IntArrayRef stride,
    IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> wanted) {
  count("aten::convolution_backward");
  const int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  auto [x, w, b] = at::convolution_backward(
      near(gradient), near(input), near(weight), at::OptionalIntArrayRef(channels), stride,
      padding, dilation, transposed, output_padding, groups, wanted);
  return {far(x), far(w), far(b)};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("as_strided", TORCH_FN(at::cpu::as_strided));
  m.impl("view", TORCH_FN(at::cpu::view));
  m.impl("_reshape_alias", TORCH_FN(at::cpu::_reshape_alias));
  m.impl("set_.source_Storage", set_whole);
  m.impl("set_.source_Storage_storage_offset", set_part);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  // torch would put these together from smaller ones; a GPU has kernels for them, as the CPU has.
  m.impl("native_group_norm", boxed());
  for (const auto& op : c10::Dispatcher::singleton().getAllOpNames()) {
    if (op.name.find("aten::_foreach_") == 0) m.impl(c10::toString(op).c_str(), boxed());
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(boxed()); }

// Under autocast, products round what they read; what else there is in torch's lists is not used here.
void rounded(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKey::AutocastPrivateUse1);
  const auto type = at::autocast::get_autocast_dtype(FAR);
  const size_t arguments = op.schema().arguments().size();
  for (size_t i = stack->size() - arguments; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isTensor()) value = at::autocast::cached_cast(type, value.toTensor(), FAR);
  }
  op.callBoxed(stack);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const char* name :
       {"conv2d", "conv_transpose2d.input", "linear", "matmul", "mm", "bmm", "addmm"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&rounded>());
  }
}

TORCH_LIBRARY(far_device, m) { m.def("take_counts", take_counts); }

}  // namespace
