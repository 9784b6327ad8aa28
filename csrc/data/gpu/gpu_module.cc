// SPDX-License-Identifier: Apache-2.0
#include "data/gpu/gpu_module.h"

#include <string>
#include <utility>

#include "kernels/gpu_source.h"

namespace farandole {

GpuModule::GpuModule(std::shared_ptr<GpuDevice> device, const nvrtc::Api& nvrtc)
    : device_(std::move(device)) {
  const std::string image = nvrtc::compile(nvrtc, gpu::kernel_source(), device_->capability());
  GpuDevice::Scope scope(*device_);
  const cuda::Api& api = device_->api();
  api.check(api.module_load(&module_, image.c_str()), "cuModuleLoadData of our kernels");
}

GpuModule::~GpuModule() {
  GpuDevice::Scope scope(*device_);
  device_->api().module_unload(module_);
}

cuda::Function GpuModule::function(const char* name) const {
  GpuDevice::Scope scope(*device_);
  cuda::Function function = nullptr;
  const cuda::Api& api = device_->api();
  api.check(api.module_function(&function, module_, name), "cuModuleGetFunction");
  return function;
}

}  // namespace farandole
