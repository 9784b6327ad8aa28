// SPDX-License-Identifier: Apache-2.0
// Finds and opens the libraries that GPUs need.
#pragma once

#include <memory>

#include "base/config.h"
#include "lib/gpu/cuda.h"
#include "lib/gpu/nccl.h"
#include "lib/gpu/nvrtc.h"
#include "lib/gpu/nvtx.h"

namespace farandole {

// Search only FARANDOLE_..._LIBRARY if it is set; else what the process has loaded, Python packages' folders,
// and the loader's path. All throw Error(kLibrary) with the remedy.
std::shared_ptr<const cuda::Api> open_cuda(const Config& config);
std::shared_ptr<const nvrtc::Api> open_nvrtc(const Config& config);
std::shared_ptr<const nccl::Api> open_nccl(const Config& config);
std::shared_ptr<const nvtx::Api> open_nvtx(const Config& config);

}  // namespace farandole
