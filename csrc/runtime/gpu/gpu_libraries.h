// SPDX-License-Identifier: Apache-2.0
// The libraries that GPUs need, and where they are looked for.
#pragma once

#include <memory>

#include "base/config.h"
#include "lib/gpu/cuda.h"
#include "lib/gpu/nccl.h"
#include "lib/gpu/nvrtc.h"
#include "lib/gpu/nvtx.h"

namespace farandole {

// FARANDOLE_..._LIBRARY alone, if it is set; else what the process has, packages' folders, the loader's. All
// throw Error(kLibrary) with the remedy.
std::shared_ptr<const cuda::Api> open_cuda(const Config& config);
std::shared_ptr<const nvrtc::Api> open_nvrtc(const Config& config);
std::shared_ptr<const nccl::Api> open_nccl(const Config& config);
std::shared_ptr<const nvtx::Api> open_nvtx(const Config& config);

}  // namespace farandole
