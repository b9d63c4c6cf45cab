// A device of torch's whose memory the host cannot follow: an address of it faults. Only torch's copies get there, by a
// second mapping of the same pages. Nothing computes on it; what torch has no kernel for goes through the host.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstring>
#include <map>
#include <mutex>
#include <sys/mman.h>
#include <unistd.h>

namespace {

struct Pages {
  char* near;
  size_t length;
};
std::mutex lock;
std::map<char*, Pages> pages;  // by the address that faults

// Where the host reaches what a far address stands for.
char* near_of(const void* address) {
  std::lock_guard<std::mutex> held(lock);
  auto* at = static_cast<char*>(const_cast<void*>(address));
  auto found = pages.upper_bound(at);
  TORCH_CHECK(found != pages.begin(), "no memory of the device");
  --found;
  TORCH_CHECK(at < found->first + found->second.length, "past the end of memory of the device");
  return found->second.near + (at - found->first);
}

void release(void* address) {
  std::lock_guard<std::mutex> held(lock);
  auto found = pages.find(static_cast<char*>(address));
  munmap(found->second.near, found->second.length);
  munmap(found->first, found->second.length);
  pages.erase(found);
}

struct FarAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device device(c10::DeviceType::PrivateUse1, 0);
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    int file = memfd_create("far-device", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(bytes)) == 0, "no memory of the device");
    auto* far = static_cast<char*>(mmap(nullptr, bytes, PROT_NONE, MAP_SHARED, file, 0));
    auto* near = static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    close(file);
    std::lock_guard<std::mutex> held(lock);
    pages[far] = {near, bytes};
    return {far, far, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(near_of(to), near_of(from), bytes);
  }
};
FarAllocator allocator;

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  constexpr c10::DispatchKeySet key(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &allocator, key, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  constexpr c10::DispatchKeySet key(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator, key, c10::dtype_or_default(dtype));
}

// A tensor of the host's over the same bytes.
at::Tensor beside(const at::Tensor& tensor) {
  if (tensor.is_cpu() || tensor.numel() == 0) return tensor.is_cpu() ? tensor : at::empty(tensor.sizes(), tensor.dtype());
  return at::from_blob(
      near_of(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
      at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  if (to.numel() > 0) beside(to).copy_(beside(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) { return beside(tensor).item(); }

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::PrivateUse1>);

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("view.dtype", &at::native::view_dtype);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>()); }
