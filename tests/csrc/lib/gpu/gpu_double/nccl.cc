// SPDX-License-Identifier: Apache-2.0
// NCCL between threads of one process, or between processes (nccl_files.h). As in NCCL, a launch runs when
// it has reached the front of its stream on every rank: launches in different orders never run.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/types.h"
#include "lib/gpu/gpu_double/gpu_double.h"
#include "lib/gpu/gpu_double/hardware.h"
#include "lib/gpu/gpu_double/nccl_group.h"

using namespace farandole;
using check::Call;
using check::dtype_of;
using check::Group;
using check::Hardware;
using check::kInvalidArgument;
using check::kInvalidUsage;
using check::Launch;
using check::open_group;
using check::What;
using nccl::Comm;
using nccl::DataType;
using nccl::RedOp;
using nccl::Result;

namespace {

std::map<std::string, std::shared_ptr<Group>> groups;  // by unique id
uint64_t next_id = 1;
std::string algorithm;

}  // namespace

Comm check::make_comm(Hardware& hardware, const nccl::UniqueId& id, int rank, int ranks) {
  auto& group = groups[std::string(id.bytes, sizeof id.bytes)];
  if (!group) group = std::make_shared<Group>();
  group->ranks = ranks;
  ++group->joined;
  auto* comm = new ncclComm;
  comm->group = group;
  comm->rank = rank;
  comm->files = NcclFiles::join(id, rank, ranks);
  comm->id = id;
  ++hardware.alive;
  return comm;
}

namespace {

// GPU_DOUBLE_NCCL names another one.
int version() {
  const char* const wanted = std::getenv("GPU_DOUBLE_NCCL");
  return wanted ? std::atoi(wanted) : 22907;
}

// What ncclCommGetAsyncError says.
Result state_of(Comm comm) {
  const auto broken = check::broken_ranks.find(comm->rank);
  if (broken != check::broken_ranks.end()) comm->state = broken->second;
  return comm->state;
}

Result enqueue(Hardware& hardware, Comm comm, cuda::Stream stream, Call call) {
  if (const Result early = state_of(comm)) return early;
  open_group.calls.push_back({comm, stream, call});
  return open_group.depth > 0 ? nccl::kSuccess : check::finish_group(hardware);
}

Result collective(const char* name, What what, const void* input, void* output, size_t count,
                  DataType type, RedOp op, int peer, Comm comm, cuda::Stream stream) {
  if (open_group.depth > 0) open_group.used.try_emplace(comm, comm);
  const check::OneThread alone(comm);
  return check::call(name, [&](Hardware& hardware) -> int {
    return enqueue(hardware, comm, stream,
                   {what, static_cast<const std::byte*>(input), static_cast<std::byte*>(output),
                    count, type, op, peer});
  });
}

}  // namespace

extern "C" {

void gpu_double_break_rank(int rank, int result) {
  auto lock = Hardware::instance().lock();
  if (result == 0) {
    check::broken_ranks.erase(rank);
  } else {
    check::broken_ranks[rank] = result;
  }
}

void gpu_double_hold_launches(bool held) {
  auto lock = Hardware::instance().lock();
  Hardware::instance().launches_held = held;
}

void gpu_double_hold_aborts(bool held) {
  auto lock = Hardware::instance().lock();
  Hardware::instance().aborts_held = held;
  Hardware::instance().changed();
}

const char* gpu_double_algorithm() {
  auto lock = Hardware::instance().lock();
  return algorithm.c_str();
}

Result ncclGetVersion(int* found) { return check::give(found, version()); }
const char* ncclGetErrorString(Result) { return "as the test asked"; }
const char* ncclGetLastError(Comm) { return "words of the double"; }

Result ncclGetUniqueId(nccl::UniqueId* id) {
  return check::call("ncclGetUniqueId", [&](auto&) {
    std::memset(id, 0, sizeof *id);
    const uint64_t maker = static_cast<uint64_t>(getpid());
    std::memcpy(id->bytes, &next_id, sizeof next_id);
    std::memcpy(id->bytes + sizeof next_id, &maker, sizeof maker);
    ++next_id;
  });
}

Result ncclCommInitRankConfig(Comm* comm, int ranks, nccl::UniqueId id, int rank,
                              nccl::ConfigV21400* config) {
  return check::call("ncclCommInitRankConfig", [&](Hardware& hardware) -> int {
    if (config->magic != 0xcafebeef || config->blocking != 1) return kInvalidArgument;
    const char* const pinned = std::getenv("NCCL_ALGO");
    algorithm = pinned ? pinned : "";
    *comm = check::make_comm(hardware, id, rank, ranks);
    return check::at_end(hardware, *comm, [&hardware, made = *comm] {
      return check::block(hardware, made, [made] {
        return made->files ? made->files->all_joined() : made->group->joined == made->group->ranks;
      });
    });
  });
}

Result ncclCommGetAsyncError(Comm comm, Result* error) {
  const check::OneThread alone(comm);
  return check::call("ncclCommGetAsyncError", [&](auto&) { *error = state_of(comm); });
}

// It raises the abort flag at once, also under another thread's call that blocks at the end of a group. What frees the
// communicator is a job: within a group it runs at its end, when that call must have come back (2.28.9 src/init.cc:2304).
// Before 2.22.3 it runs at once (2.21.5 src/init.cc, ncclCommAbort).
Result ncclCommAbort(Comm comm) {
  std::optional<check::OneThread> alone;
  if (open_group.depth == 0) alone.emplace(comm);
  return check::call("ncclCommAbort", [&](Hardware& hardware) -> int {
    comm->abort_raised = true;
    if (!hardware.aborts_held) *comm->aborted = true;
    hardware.changed();
    open_group.jobs.push_back([&hardware, comm]() -> Result {
      const check::OneThread back(comm);
      hardware.wait([&] { return !hardware.aborts_held; });
      *comm->aborted = true;
      --hardware.alive;
      delete comm;
      hardware.changed();
      return nccl::kSuccess;
    });
    const bool waits = open_group.depth > 0 && version() >= 22203;
    return waits ? nccl::kSuccess : check::finish_group(hardware);
  });
}
Result ncclCommFinalize(Comm comm) {
  const check::OneThread alone(comm);
  return check::call("ncclCommFinalize", [&](auto&) -> int { return state_of(comm); });
}
Result ncclCommDestroy(Comm comm) {
  const check::OneThread alone(comm);
  return check::call("ncclCommDestroy", [&](Hardware& hardware) -> int {
    if (const Result early = state_of(comm)) return early;
    return check::at_end(hardware, comm, [&hardware, comm]() -> Result {
      --hardware.alive;
      delete comm;
      return nccl::kSuccess;
    });
  });
}

Result ncclGroupStart() {
  ++open_group.depth;
  return 0;
}
Result ncclGroupEnd() {
  if (--open_group.depth > 0) return 0;
  const auto group = std::exchange(open_group.used, {});
  return check::call("ncclGroupEnd",
                     [&](Hardware& hardware) -> int { return check::finish_group(hardware); });
}

Result ncclAllReduce(const void* input, void* output, size_t count, DataType type, RedOp op,
                     Comm comm, cuda::Stream stream) {
  return collective("ncclAllReduce", What::kAllReduce, input, output, count, type, op, 0, comm,
                    stream);
}
Result ncclBroadcast(const void* input, void* output, size_t count, DataType type, int root,
                     Comm comm, cuda::Stream stream) {
  return collective("ncclBroadcast", What::kBroadcast, input, output, count, type, 0, root, comm,
                    stream);
}
Result ncclReduce(const void* input, void* output, size_t count, DataType type, RedOp op, int root,
                  Comm comm, cuda::Stream stream) {
  return collective("ncclReduce", What::kReduce, input, output, count, type, op, root, comm,
                    stream);
}
Result ncclAllGather(const void* input, void* output, size_t count, DataType type, Comm comm,
                     cuda::Stream stream) {
  return collective("ncclAllGather", What::kAllGather, input, output, count, type, 0, 0, comm,
                    stream);
}
Result ncclReduceScatter(const void* input, void* output, size_t count, DataType type, RedOp op,
                         Comm comm, cuda::Stream stream) {
  return collective("ncclReduceScatter", What::kReduceScatter, input, output, count, type, op, 0,
                    comm, stream);
}
Result ncclSend(const void* input, size_t count, DataType type, int peer, Comm comm,
                cuda::Stream stream) {
  return collective("ncclSend", What::kSend, input, nullptr, count, type, 0, peer, comm, stream);
}
Result ncclRecv(void* output, size_t count, DataType type, int peer, Comm comm,
                cuda::Stream stream) {
  return collective("ncclRecv", What::kReceive, nullptr, output, count, type, 0, peer, comm,
                    stream);
}

}  // extern "C"
