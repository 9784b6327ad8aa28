// SPDX-License-Identifier: Apache-2.0
// Communicators of the NCCL double.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "lib/gpu/gpu_double/hardware.h"
#include "lib/gpu/gpu_double/nccl_files.h"
#include "lib/gpu/gpu_double/nccl_launch.h"
#include "lib/gpu/gpu_double/nccl_memory.h"
#include "lib/gpu/nccl.h"

namespace farandole::check {

constexpr nccl::Result kInvalidArgument = 4;
constexpr nccl::Result kInvalidUsage = 5;

// All ranks of a communicator that are threads of this process.
struct Group {
  int ranks = 0;
  int joined = 0;
  std::map<uint64_t, std::shared_ptr<Launch>> launches;
  std::map<std::tuple<int, int, uint64_t>, std::shared_ptr<Transfer>>
      transfers;                                       // from, to, number
  std::map<uint64_t, std::map<int, NcclPart>> splits;  // by number, then rank
  std::map<uint64_t, std::set<int>> registrations;     // which ranks are in this one
};

// A rank's place in a new communicator.
nccl::Comm make_comm(Hardware& hardware, const nccl::UniqueId& id, int rank, int ranks);
// Whether all ranks are in the split of this number; then its part is made.
bool split_ends(Hardware& hardware, nccl::Comm comm, uint64_t number, nccl::Comm* part);

// As ncclCommEnsureReady (2.28.9 src/init.cc:373): who is refused has called too early.
nccl::Result ensure_ready(nccl::Comm comm);

// What NCCL does in a thread of its own: the call that begins it returns, and the communicator is in progress until it
// has ended (2.28.9 src/group.cc:712). It takes `ready` and a while; then `finish` is called.
void begin_job(Hardware& hardware, nccl::Comm comm, std::function<bool()> ready,
               std::function<void()> finish);
void drop_jobs(nccl::Comm comm);

// One thread at a time in a communicator, from the first call of a group to its end: ncclCommGetAsyncError, too, joins and
// frees the group's job (2.28.9 src/init.cc:2733).
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
  uint64_t launches = 0;                                         // of collectives
  std::map<int, uint64_t> sent, received;                        // by peer
  farandole::nccl::Result state = farandole::nccl::kInProgress;  // what ncclCommGetAsyncError says
  std::shared_ptr<bool> aborted = std::make_shared<bool>(false);
  std::vector<std::optional<double>> weights;          // of operators; empty: destroyed
  std::shared_ptr<farandole::check::NcclFiles> files;  // null: all ranks are threads
  farandole::check::Registrations registered;
  farandole::nccl::UniqueId id;
  std::shared_ptr<uint64_t> under_way = std::make_shared<uint64_t>(0);  // launches
  uint64_t splits = 0;
  uint64_t registrations = 0;  // jobs that register windows
  std::shared_ptr<std::atomic<std::thread::id>> user =
      std::make_shared<std::atomic<std::thread::id>>();
};
