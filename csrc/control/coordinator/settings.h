// SPDX-License-Identifier: Apache-2.0
// The coordinator's parameters, fixed for the job: size, limits, timeouts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace farandole {

struct CoordinatorSettings {
  int size = 1;                              // ranks of the world
  size_t fusion_bytes = 32 << 20;            // per bucket
  size_t gpu_fusion_bytes = 64 << 20;        // per GPU bucket
  std::string gpu_backend = "auto";          // or nccl, host
  std::string shared_gpu = "error";          // two ranks on one GPU: error, host or nccl
  std::string gpu_order = "background";      // or program
  size_t capacity = 8192;                    // ids alive at once
  bool average_active = false;               // Average divides by members that have not joined
  bool check_sites = false;                  // calls from different lines that match by order fail
  int max_sets = 64;                         // process sets alive at once, the world included
  int64_t stall_warn_ns = 10'000'000'000;    // 0: never
  int64_t stall_abort_ns = 300'000'000'000;  // 0: never
};

}  // namespace farandole
