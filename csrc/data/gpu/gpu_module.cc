// SPDX-License-Identifier: Apache-2.0
// The thread that submits the first GPU tensor creates the GpuModule. Any thread may use it.
#include "data/gpu/gpu_module.h"

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/own_file.h"
#include "kernels/gpu_source.h"
#include "lib/os/text_file.h"

namespace farandole {
namespace {

constexpr size_t kSealBytes = 16;

std::string digest(const std::string& text) {
  char digits[kSealBytes + 1];
  const uint64_t hash = std::hash<std::string>{}(text);
  std::snprintf(digits, sizeof digits, "%016" PRIx64, hash);
  return digits;
}

// Ignores relative folders, as the XDG specification requires.
std::string cache_folder() {
  const char* const cache = std::getenv("XDG_CACHE_HOME");
  if (cache && *cache == '/') return std::string(cache) + "/farandole";
  const char* const home = std::getenv("HOME");
  return home && *home == '/' ? std::string(home) + "/.cache/farandole" : "";
}

std::string path_of(const std::string& key) {
  const std::string folder = cache_folder();
  return folder.empty() ? "" : folder + "/kernels-" + digest(key);
}

}  // namespace

KernelCache::KernelCache(const nvrtc::Api& nvrtc, const std::string& source, int capability)
    : key_(nvrtc.path + " " + std::to_string(nvrtc.major) + "." + std::to_string(nvrtc.minor) +
           " sm_" + std::to_string(capability) + "\n" + source),
      path_(path_of(key_)) {}

std::string KernelCache::seal(const std::string& image) const {
  return digest(key_ + "\n" + image);
}

std::string KernelCache::read() const {
  std::string why;
  std::string image = read_own_file(path_, why).value_or("");
  if (image.size() <= kSealBytes) return {};
  const std::string sealed = image.substr(image.size() - kSealBytes);
  image.resize(image.size() - kSealBytes);
  return sealed == seal(image) ? image : std::string();
}

void KernelCache::write(const std::string& image) const {
  if (path_.empty()) return;
  try {
    make_folder(path_.substr(0, path_.rfind('/')));
    write_text_file(path_, image + seal(image));
  } catch (const Error&) {  // the disk is full, or the folder is not writable
  }
}

GpuModule::GpuModule(std::shared_ptr<GpuDevice> device, const nvrtc::Api& nvrtc)
    : device_(std::move(device)) {
  const std::string source = gpu::kernel_source();
  const KernelCache cache(nvrtc, source, device_->capability());
  std::string image = cache.read();
  GpuDevice::Scope scope(*device_);
  const cuda::Api& api = device_->api();
  if (image.empty() || api.module_load(&module_, image.c_str()) != cuda::kSuccess) {
    image = nvrtc::compile(nvrtc, source, device_->capability());
    api.check(api.module_load(&module_, image.c_str()), "cuModuleLoadData of farandole's kernels");
    cache.write(image);
  }
  device_->unload_at_end(module_);
}

cuda::Function GpuModule::function(const char* name) const {
  GpuDevice::Scope scope(*device_);
  cuda::Function function = nullptr;
  const cuda::Api& api = device_->api();
  api.check(api.module_function(&function, module_, name), "cuModuleGetFunction");
  return function;
}

}  // namespace farandole
