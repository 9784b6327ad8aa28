// SPDX-License-Identifier: Apache-2.0
// Our kernels, compiled for one device and loaded there.
#pragma once

#include <memory>

#include "lib/gpu/gpu_device.h"
#include "lib/gpu/nvrtc.h"

namespace farandole {

class GpuModule {
 public:
  // Throws Error(kLibrary).
  GpuModule(std::shared_ptr<GpuDevice> device, const nvrtc::Api& nvrtc);
  ~GpuModule();
  GpuModule(const GpuModule&) = delete;
  GpuModule& operator=(const GpuModule&) = delete;

  const std::shared_ptr<GpuDevice>& device() const { return device_; }
  cuda::Function function(const char* name) const;

 private:
  const std::shared_ptr<GpuDevice> device_;
  cuda::Module module_ = nullptr;
};

}  // namespace farandole
