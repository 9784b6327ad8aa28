// SPDX-License-Identifier: Apache-2.0
// Our kernels, compiled for one device and loaded there, or taken from the user's cache.
#pragma once

#include <memory>
#include <string>

#include "lib/gpu/gpu_device.h"
#include "lib/gpu/nvrtc.h"

namespace farandole {

// Caches compiled kernels in a file, because NVRTC takes a second of each rank's start. Many processes, also of other
// hosts, may read and write the file at once.
class KernelCache {
 public:
  // Key: this NVRTC, the source and the compute capability. In $XDG_CACHE_HOME/farandole or ~/.cache/farandole.
  KernelCache(const nvrtc::Api& nvrtc, const std::string& source, int capability);

  // The cached image. Empty if there is none, if it is incomplete, or if other users may write the file.
  std::string read() const;
  // Failures are ignored; the next process compiles again.
  void write(const std::string& image) const;
  const std::string& path() const { return path_; }  // empty: the user has no such folder

 private:
  std::string seal(const std::string& image) const;

  const std::string key_;  // all that determines the image
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
