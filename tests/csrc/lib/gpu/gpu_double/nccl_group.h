// SPDX-License-Identifier: Apache-2.0
// What a group of calls has gathered in this thread, and how it is launched.
#pragma once

#include <map>
#include <vector>

#include "lib/gpu/gpu_double/nccl_comm.h"

namespace farandole::check {

struct Pending {
  nccl::Comm comm;
  cuda::Stream stream;
  Call call;
};
struct OpenGroup {
  int depth = 0;
  std::vector<Pending> calls;
  std::vector<std::function<nccl::Result()>> jobs;
  std::map<nccl::Comm, OneThread> used;
};
extern thread_local OpenGroup open_group;
extern std::map<int, nccl::Result> broken_ranks;

nccl::Result finish_group(Hardware& hardware);

}  // namespace farandole::check
