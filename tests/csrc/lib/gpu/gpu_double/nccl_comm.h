// SPDX-License-Identifier: Apache-2.0
// Communicators of the NCCL double.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "lib/gpu/gpu_double/hardware.h"
#include "lib/gpu/gpu_double/nccl_files.h"
#include "lib/gpu/gpu_double/nccl_launch.h"
#include "lib/gpu/nccl.h"

namespace farandole::check {

constexpr nccl::Result kInternalError = 3;
constexpr nccl::Result kInvalidArgument = 4;
constexpr nccl::Result kInvalidUsage = 5;

// All ranks of a communicator that are threads of this process.
struct Group {
  int ranks = 0;
  int joined = 0;
  std::map<uint64_t, std::shared_ptr<Launch>> launches;
  std::map<std::tuple<int, int, uint64_t>, std::shared_ptr<Transfer>>
      transfers;  // from, to, number
};

// A rank's place in a new communicator.
nccl::Comm make_comm(Hardware& hardware, const nccl::UniqueId& id, int rank, int ranks);

// What a call does at the end of its group, or at once outside of one (2.28.9 src/group.cc:20).
nccl::Result at_end(Hardware& hardware, nccl::Comm comm, std::function<nccl::Result()> job);
// Blocks the caller until `ready`. An abort, or an error of this rank, ends it.
nccl::Result block(Hardware& hardware, nccl::Comm comm, const std::function<bool()>& ready);

// One thread at a time in a communicator, from the first call of a group to its end; but for ncclCommAbort in a group.
class OneThread {
 public:
  explicit OneThread(nccl::Comm comm);
  ~OneThread();
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  std::shared_ptr<std::atomic<std::thread::id>> user_;
  bool outermost_;
};

}  // namespace farandole::check

struct ncclComm {
  std::shared_ptr<farandole::check::Group> group;
  int rank = 0;
  uint64_t launches = 0;                                          // of collectives
  std::map<int, uint64_t> sent, received;                         // by peer
  farandole::nccl::Result state = farandole::nccl::kSuccess;      // what ncclCommGetAsyncError says
  bool abort_raised = false;                                      // calls of the host look at it
  std::shared_ptr<bool> aborted = std::make_shared<bool>(false);  // kernels look at it
  std::shared_ptr<farandole::check::NcclFiles> files;             // null: all ranks are threads
  farandole::nccl::UniqueId id;
  std::shared_ptr<std::atomic<std::thread::id>> user =
      std::make_shared<std::atomic<std::thread::id>>();
};
