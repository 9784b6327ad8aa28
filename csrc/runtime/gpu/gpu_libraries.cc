// SPDX-License-Identifier: Apache-2.0
// See gpu_libraries.h. Used by RankGpu, in the thread of the rank's first GPU tensor.
#include "runtime/gpu/gpu_libraries.h"

#include <unistd.h>

#include <string>
#include <vector>

namespace farandole {
namespace {

std::vector<std::string> places(const std::string& chosen, const std::vector<std::string>& folders,
                                const std::vector<std::string>& names) {
  if (!chosen.empty()) return {chosen};
  std::vector<std::string> paths;
  for (const std::string& name : names) {
    for (const std::string& folder : folders) {
      const std::string path = folder + "/" + name;
      if (access(path.c_str(), R_OK) == 0) paths.push_back(path);
    }
  }
  paths.insert(paths.end(), names.begin(), names.end());
  return paths;
}

}  // namespace

std::shared_ptr<const cuda::Api> open_cuda(const Config& config) {
  return cuda::open(config.cuda_library);
}

std::shared_ptr<const nvrtc::Api> open_nvrtc(const Config& config) {
  return nvrtc::open(places(config.nvrtc_library, config.library_folders,
                            {"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2"}));
}

std::shared_ptr<const nccl::Api> open_nccl(const Config& config) {
  return nccl::open(places(config.nccl_library, config.library_folders, {"libnccl.so.2"}));
}

std::shared_ptr<const nvtx::Api> open_nvtx(const Config& config) {
  return nvtx::open(places(config.nvtx_library, config.library_folders,
                           {"libnvtx3interop.so.1", "libnvToolsExt.so.1"}));
}

}  // namespace farandole
