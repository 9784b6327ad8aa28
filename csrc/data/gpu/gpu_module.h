// SPDX-License-Identifier: Apache-2.0
// Loads farandole's kernels into one device: compiles them, or takes them from the user's cache.
#pragma once

#include <memory>
#include <string>

#include "lib/gpu/gpu_device.h"
#include "lib/gpu/nvrtc.h"

namespace farandole {

// Caches compiled kernels in a file, because compiling takes each rank a second. Many processes, also on other hosts,
// may read and write the file concurrently.
class KernelCache {
 public:
  // The key is NVRTC's path and version, the source and the compute capability. The file is in
  // $XDG_CACHE_HOME/farandole or ~/.cache/farandole.
  KernelCache(const nvrtc::Api& nvrtc, const std::string& source, int capability);

  // Returns the cached image; empty: there is none, it is incomplete, or other users may write to the file.
  std::string read() const;
  // Ignores failures; the next process compiles again.
  void write(const std::string& image) const;
  const std::string& path() const { return path_; }  // empty: there is no folder for it

 private:
  std::string seal(const std::string& image) const;

  const std::string key_;  // everything that determines the image
  const std::string path_;
};

class GpuModule {
 public:
  GpuModule(std::shared_ptr<GpuDevice> device, const nvrtc::Api& nvrtc);

  const std::shared_ptr<GpuDevice>& device() const { return device_; }
  cuda::Function function(const char* name) const;

 private:
  const std::shared_ptr<GpuDevice> device_;
  cuda::Module module_ = nullptr;
};

}  // namespace farandole
