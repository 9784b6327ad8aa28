// SPDX-License-Identifier: Apache-2.0
// This rank's GPU: its libraries, device and kernels, and the lane that launches buckets. GpuAccess creates it.
#pragma once

#include <memory>

#include "base/config.h"
#include "control/protocol/message.h"
#include "data/backend/backend.h"
#include "data/gpu/gpu_lane.h"
#include "data/gpu/gpu_module.h"
#include "data/gpu/gpu_mover.h"
#include "lib/gpu/cuda.h"
#include "lib/gpu/nccl.h"
#include "lib/gpu/nvrtc.h"
#include "lib/gpu/nvtx.h"

namespace farandole {

// Each function opens the library in FARANDOLE_..._LIBRARY if that variable is set. Otherwise it opens the library that
// the process has already loaded, one in the folders of Python packages, or one in the loader's path. Throws
// Error(kLibrary), whose text names a remedy.
std::shared_ptr<const cuda::Api> open_cuda(const Config& config);
std::shared_ptr<const nvrtc::Api> open_nvrtc(const Config& config);
std::shared_ptr<const nccl::Api> open_nccl(const Config& config);
std::shared_ptr<const nvtx::Api> open_nvtx(const Config& config);

class RankGpu {
 public:
  // Throws Error(kLibrary).
  RankGpu(const Config& config, int ordinal, std::function<void()> ring);

  int ordinal() const { return device_->ordinal(); }
  const std::shared_ptr<GpuDevice>& device() const { return device_; }
  // Returns the report for the coordinator. `host` is the lowest rank of this host.
  UseGpu describe(Rank host) const;

  // ---- Driver only
  GpuLane& lane() { return lane_; }
  bool names_ranges() const { return ranges_ != nullptr; }
  bool holds_launches() const { return holds_launches_; }  // FARANDOLE_GPU_ORDER=program
  // Opens a set's NCCL backend, or connects the backend if `step` has the key.
  void open_library(const OpenGpu& step, int member, int members);
  void open_staged(SetId set, std::unique_ptr<Backend> host, int member, int members);

 private:
  const Config& config_;
  const std::function<void()> ring_;
  const bool holds_launches_;
  std::shared_ptr<const nccl::Api> nccl_;  // nullptr if there is no usable NCCL
  const std::shared_ptr<GpuDevice> device_;
  const std::shared_ptr<const GpuModule> module_;
  const GpuMover mover_;
  const std::shared_ptr<const nvtx::Api> ranges_;  // nullptr if no profiler is attached
  GpuLane lane_;
};

}  // namespace farandole
