// SPDX-License-Identifier: Apache-2.0
#include "lib/gpu/nvtx.h"

#include "base/error.h"
#include "lib/os/dl.h"

namespace farandole::nvtx {

std::shared_ptr<const Api> open(const std::vector<std::string>& paths) {
  const auto library = DynamicLibrary::open(paths, "NVTX, which only Nsight needs",
                                            "run: pip install nvidia-nvtx (or nvidia-nvtx-cu12)");
  auto api = std::make_shared<Api>();
  api->path = library.name();
  library.fill(api->push, "nvtxRangePushA");
  library.fill(api->pop, "nvtxRangePop");
  return api;
}

}  // namespace farandole::nvtx
