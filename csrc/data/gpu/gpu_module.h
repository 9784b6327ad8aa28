// SPDX-License-Identifier: Apache-2.0
// Our kernels, compiled for one device and loaded there, or found in the user's cache.
#pragma once

#include <memory>
#include <string>

#include "lib/gpu/gpu_device.h"
#include "lib/gpu/nvrtc.h"

namespace farandole {

// Our kernels as this user's processes have compiled them before, in a file: NVRTC takes a second of each rank's
// start. Many processes, also of other hosts, may read and write the file at once.
class KernelCache {
 public:
  // What this NVRTC makes of the source for this compute capability. In $XDG_CACHE_HOME/farandole, else in
  // ~/.cache/farandole.
  KernelCache(const nvrtc::Api& nvrtc, const std::string& source, int capability);

  // Empty: there is none, or other users may write it, or it is not what write() was given: the driver would read beyond
  // the end of half an image.
  std::string read() const;
  // Where it cannot be kept, the next process compiles as well.
  void write(const std::string& image) const;
  const std::string& path() const { return path_; }  // empty: the user has no such folder

 private:
  std::string seal(const std::string& image) const;

  const std::string key_;  // all that the image follows from
  const std::string path_;
};

class GpuModule {
 public:
  // Throws Error(kLibrary).
  GpuModule(std::shared_ptr<GpuDevice> device, const nvrtc::Api& nvrtc);

  const std::shared_ptr<GpuDevice>& device() const { return device_; }
  cuda::Function function(const char* name) const;

 private:
  const std::shared_ptr<GpuDevice> device_;
  cuda::Module module_ = nullptr;
};

}  // namespace farandole
