// SPDX-License-Identifier: Apache-2.0
// Communicators of the NCCL double.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "gpu_double/hardware.h"
#include "gpu_double/nccl_files.h"
#include "gpu_double/nccl_launch.h"
#include "gpu_double/nccl_memory.h"
#include "lib/gpu/nccl.h"

namespace farandole::check {

constexpr nccl::Result kInvalidArgument = 4;
constexpr nccl::Result kInvalidUsage = 5;

// All ranks of a communicator that are threads of this process.
struct Group {
  int ranks = 0;
  int joined = 0;
  std::map<uint64_t, std::shared_ptr<Launch>> launches;
  std::map<uint64_t, std::map<int, NcclPart>> splits;  // by number, then rank
};

// A rank's place in a new communicator.
nccl::Comm make_comm(Hardware& hardware, const nccl::UniqueId& id, int rank, int ranks);
// Whether the split that it is in has come to its end; then its part is made.
bool split_ends(Hardware& hardware, nccl::Comm comm);

}  // namespace farandole::check

struct ncclComm {
  std::shared_ptr<farandole::check::Group> group;
  int rank = 0;
  uint64_t launches = 0;
  int polls = 2;  // async_error says "in progress" so many times more
  bool connected = false;
  farandole::nccl::Result error = 0;
  std::shared_ptr<bool> aborted = std::make_shared<bool>(false);
  std::vector<double> weights;
  std::shared_ptr<farandole::check::NcclFiles> files;  // null: all ranks are threads
  farandole::check::Registrations registered;
  farandole::nccl::UniqueId id;
  std::shared_ptr<uint64_t> under_way = std::make_shared<uint64_t>(0);  // launches
  uint64_t splits = 0;
  farandole::nccl::Comm* part = nullptr;  // where the split that is under way leaves its result
};
