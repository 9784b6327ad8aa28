// SPDX-License-Identifier: Apache-2.0
// What the coordinator is told once: a job's size, limits and patience.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace farandole {

struct CoordinatorSettings {
  int size = 1;                              // ranks of the world
  size_t fusion_bytes = 32 << 20;            // of one bucket
  size_t gpu_fusion_bytes = 64 << 20;        // of one on GPUs
  std::string gpu_plane = "auto";            // or nccl, host
  std::string shared_gpu = "error";          // two ranks on one GPU; or host, nccl
  std::string gpu_order = "background";      // or program
  size_t capacity = 8192;                    // ids alive at once
  bool average_active = false;               // Average divides by the members that have not joined
  int max_sets = 64;                         // process sets alive at once, the world included
  int64_t stall_warn_ns = 10'000'000'000;    // 0: never
  int64_t stall_abort_ns = 300'000'000'000;  // 0: never
  int bundles = 8;                // that a repeated step is predicted as; 0: no prediction
  size_t bundle_bytes = 1 << 20;  // at least, unless the step ends or somebody waits there
  int repeats = 2;                // of a step before it is predicted
  // Inputs that could ride along are predicted too. Only where lanes add them in the same order: between
  // hosts they do not, and a sum's bits must not depend on its being predicted.
  bool bundle_tiny = true;
};

}  // namespace farandole
