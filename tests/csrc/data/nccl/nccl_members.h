// SPDX-License-Identifier: Apache-2.0
// Members of an NCCL communicator on the double.
#pragma once

#include <vector>

#include "lib/gpu/gpu_library.h"

namespace farandole::check {

inline nccl::UniqueId new_nccl_id() {
  nccl::UniqueId id;
  gpu_library().nccl->check(gpu_library().nccl->unique_id(&id), "ncclGetUniqueId");
  return id;
}

}  // namespace farandole::check
