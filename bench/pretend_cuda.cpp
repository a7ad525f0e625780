// A CUDA device for autograd's bookkeeping where there is none: streams and events that do nothing. With it, fake
// tensors of a GPU can be traced forward and backward by a torch for CPUs. It must be loaded before torch is imported.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at {
namespace {

const c10::Device device(c10::DeviceType::CUDA, 0);

struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return device; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, device); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

struct Hooks : CUDAHooksInterface {
  explicit Hooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  // a torch for CUDA asks where it chooses an attention
  long versionCuDNN() const override { return 0; }
  long versionRuntimeCuDNN() const override { return 0; }
};

const c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, new Guard());
// above those of a torch for CUDA, whose own find no driver
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, Hooks)

}  // namespace
}  // namespace at
