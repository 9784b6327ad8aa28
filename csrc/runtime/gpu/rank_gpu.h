// SPDX-License-Identifier: Apache-2.0
// This rank's GPU: the libraries, the device, our kernel, and the lane on which buckets are launched. Opened
// by the first tensor on a GPU: scripts choose their device after init().
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "base/config.h"
#include "control/protocol/message.h"
#include "data/gpu/gpu_adasum.h"
#include "data/gpu/gpu_lane.h"
#include "data/gpu/gpu_mover.h"
#include "data/nccl/nccl_communicator.h"
#include "data/plane/lane.h"
#include "lib/gpu/gpu_window.h"
#include "lib/gpu/nccl.h"
#include "lib/gpu/nvtx.h"

namespace farandole {

class NcclPlane;

class RankGpu {
 public:
  // Throws Error(kLibrary).
  RankGpu(const Config& config, int ordinal, std::function<void()> ring);

  int ordinal() const { return device_->ordinal(); }
  const std::shared_ptr<GpuDevice>& device() const { return device_; }
  // What the coordinator must know. `host`: the lowest rank of this host.
  UseGpu describe(Rank host) const;
  std::string new_key() const;  // of a communicator
  // For zero copy; ordinary memory where NCCL registers none, said once in the log. Any thread.
  std::shared_ptr<GpuWindow> open_window(SetId set, size_t bytes);
  const GpuWindows& windows() const { return windows_; }
  const GpuAdasum& adasum() const { return adasum_; }

  // ---- the driver
  GpuLane& lane() { return lane_; }
  bool names_ranges() const { return ranges_ != nullptr; }
  bool holds_launches() const { return holds_launches_; }  // FARANDOLE_GPU_ORDER=program
  void open_nccl(SetId set, const std::string& key, int member, int members);
  // The same by a split of the world's communicator, in which all its ranks take part; `member`: -1: not in the set.
  void split_nccl(SetId set, int member, int members);
  void open_staged(SetId set, std::unique_ptr<Lane> host, int member, int members);

 private:
  NcclCommunicator::Setup setup_of(int member, int members) const;

  const Config& config_;
  const std::function<void()> ring_;
  const bool holds_launches_;
  std::shared_ptr<const nccl::Api> nccl_;  // nullptr: none that we can use
  const std::shared_ptr<GpuDevice> device_;
  const std::shared_ptr<const GpuModule> module_;
  const GpuMover mover_;
  const GpuAdasum adasum_;
  const std::shared_ptr<const nvtx::Api> ranges_;  // nullptr: no profiler listens
  GpuWindows windows_;
  std::atomic<bool> told_of_copies_{false};
  NcclPlane* world_ = nullptr;  // the lane's
  GpuLane lane_;
};

}  // namespace farandole
