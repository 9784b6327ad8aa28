// SPDX-License-Identifier: Apache-2.0
// Loads farandole's kernels into one device. Compiles the kernels or takes them from the user's cache.
#pragma once

#include <memory>
#include <string>

#include "lib/gpu/gpu_device.h"
#include "lib/gpu/nvrtc.h"

namespace farandole {

// Caches compiled kernels in a file, because compiling takes a second on each rank. Many processes, including processes
// on other hosts, may read and write the file concurrently.
class KernelCache {
 public:
  // The key is NVRTC's path and version, the source and the compute capability. The file is in
  // $XDG_CACHE_HOME/farandole or ~/.cache/farandole.
  KernelCache(const nvrtc::Api& nvrtc, const std::string& source, int capability);

  // Returns the cached image, or an empty string if the file is missing, incomplete, or writable by other users.
  std::string read() const;
  // Ignores failures. After a failure, the next process compiles the kernels again.
  void write(const std::string& image) const;
  const std::string& path() const { return path_; }  // empty if there is no folder for the file

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
