// SPDX-License-Identifier: Apache-2.0
// NCCL between threads of one process, or between processes (nccl_files.h). As in NCCL, a launch runs when
// it has reached the front of its stream on every rank: launches in different orders never run.
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <vector>

#include "base/types.h"
#include "gpu_double/gpu_double.h"
#include "gpu_double/hardware.h"
#include "gpu_double/nccl_comm.h"

using namespace farandole;
using check::Call;
using check::dtype_of;
using check::Group;
using check::Hardware;
using check::kInvalidArgument;
using check::kInvalidUsage;
using check::Launch;
using check::What;
using nccl::Comm;
using nccl::DataType;
using nccl::RedOp;
using nccl::Result;

namespace {

std::map<std::string, std::shared_ptr<Group>> groups;  // by unique id
std::map<int, Result> broken_ranks;
uint64_t next_id = 1;
std::string algorithm;
uint64_t placed_bytes = 0;

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

struct Pending {
  Comm comm;
  cuda::Stream stream;
  Call call;
};
thread_local int depth = 0;
thread_local std::vector<Pending> pending;

void start(Hardware& hardware, Comm comm, cuda::Stream stream, std::vector<Call> calls) {
  const uint64_t number = comm->launches++;
  auto& launch = comm->group->launches[number];
  const auto ranks = static_cast<size_t>(comm->group->ranks);
  if (!launch) launch = std::make_shared<Launch>(ranks);
  const auto rank = static_cast<size_t>(comm->rank);
  for (Call& call : calls) {
    (call.what < What::kSend ? launch->calls : launch->transfers)[rank].push_back(call);
  }
  const auto ready = [launch = launch, rank, number, aborted = comm->aborted, mine = comm->rank,
                      files = comm->files] {
    if (*aborted) return true;
    if (broken_ranks.contains(mine)) return false;
    if (files) return files->meet(number, *launch);
    launch->arrived[rank] = true;
    for (bool arrived : launch->arrived) {
      if (!arrived) return false;
    }
    return true;
  };
  ++*comm->under_way;
  hardware.push(stream, ready, [launch = launch, aborted = comm->aborted, left = comm->under_way] {
    if (!*aborted) check::run(*launch);
    launch->kept.clear();
    --*left;
  });
}

Result enqueue(Hardware& hardware, Comm comm, cuda::Stream stream, Call call) {
  if (!comm->connected) return kInvalidUsage;
  if (comm->error) return comm->error;
  if (call.op > nccl::kAverage) {
    call.weight = comm->weights.at(static_cast<size_t>(call.op - 5));
  }
  const void* const buffer = call.output ? call.output : call.input;
  if (!comm->registered.place_of(buffer, call.place)) return kInvalidUsage;
  if (call.place != 0) placed_bytes += call.count * size_of(dtype_of(call.type));
  if (depth > 0) {
    pending.push_back({comm, stream, call});
  } else {
    start(hardware, comm, stream, {call});
  }
  return 0;
}

Result collective(const char* name, What what, const void* input, void* output, size_t count,
                  DataType type, RedOp op, int peer, Comm comm, cuda::Stream stream) {
  return check::call(name, [&](Hardware& hardware) -> int {
    return enqueue(hardware, comm, stream,
                   {what, static_cast<const std::byte*>(input), static_cast<std::byte*>(output),
                    count, type, op, 1.0, peer});
  });
}

}  // namespace

extern "C" {

void gpu_double_break_rank(int rank, int result) {
  auto lock = Hardware::instance().lock();
  if (result == 0) {
    broken_ranks.erase(rank);
  } else {
    broken_ranks[rank] = result;
  }
}

uint64_t gpu_double_placed_bytes() {
  auto lock = Hardware::instance().lock();
  return placed_bytes;
}

const char* gpu_double_algorithm() {
  auto lock = Hardware::instance().lock();
  return algorithm.c_str();
}

Result ncclGetVersion(int* version) {
  *version = 22705;
  return 0;
}
const char* ncclGetErrorString(Result) { return "as the test asked"; }
const char* ncclGetLastError(Comm) { return "words of the double"; }

Result ncclGetUniqueId(nccl::UniqueId* id) {
  return check::call("ncclGetUniqueId", [&](Hardware&) -> int {
    std::memset(id, 0, sizeof *id);
    const uint64_t maker = static_cast<uint64_t>(getpid());
    std::memcpy(id->bytes, &next_id, sizeof next_id);
    std::memcpy(id->bytes + sizeof next_id, &maker, sizeof maker);
    ++next_id;
    return 0;
  });
}

Result ncclCommInitRankConfig(Comm* comm, int ranks, nccl::UniqueId id, int rank,
                              nccl::ConfigV21400* config) {
  return check::call("ncclCommInitRankConfig", [&](Hardware& hardware) -> int {
    if (config->magic != 0xcafebeef || config->blocking != 0) return kInvalidArgument;
    const char* const pinned = std::getenv("NCCL_ALGO");
    algorithm = pinned ? pinned : "";
    *comm = check::make_comm(hardware, id, rank, ranks);
    return nccl::kInProgress;
  });
}

Result ncclCommGetAsyncError(Comm comm, Result* error) {
  return check::call("ncclCommGetAsyncError", [&](Hardware& hardware) -> int {
    const auto broken = broken_ranks.find(comm->rank);
    if (broken != broken_ranks.end()) comm->error = broken->second;
    *error = comm->error;
    if (comm->error || comm->connected) return 0;
    const bool all =
        comm->files ? comm->files->all_joined() : comm->group->joined == comm->group->ranks;
    comm->connected =
        all && (!comm->part || check::split_ends(hardware, comm)) && comm->polls-- <= 0;
    if (!comm->connected) *error = nccl::kInProgress;
    return 0;
  });
}

Result ncclCommAbort(Comm comm) {
  return check::call("ncclCommAbort", [&](Hardware& hardware) -> int {
    *comm->aborted = true;
    comm->registered.drop_all();
    --hardware.alive;
    delete comm;
    hardware.changed();
    return 0;
  });
}
Result ncclCommFinalize(Comm comm) {
  return check::call("ncclCommFinalize", [&](Hardware&) -> int {
    comm->connected = false;  // until async_error has said so for a while
    comm->polls = 2;
    return nccl::kInProgress;
  });
}
Result ncclCommDestroy(Comm comm) {
  return check::call("ncclCommDestroy", [&](Hardware& hardware) -> int {
    if (!comm->connected || !comm->registered.empty())
      return kInvalidUsage;  // a leak: alive() tells
    --hardware.alive;
    delete comm;
    return 0;
  });
}

Result ncclRedOpCreatePreMulSum(RedOp* op, void* weight, DataType type, int residence, Comm comm) {
  return check::call("ncclRedOpCreatePreMulSum", [&](Hardware&) -> int {
    if (residence != nccl::kScalarHost) return kInvalidArgument;
    const DType dtype = dtype_of(type);
    double value = 0;
    float single = 0;
    uint16_t half = 0;
    if (dtype == DType::kFloat64) {
      std::memcpy(&value, weight, sizeof value);
    } else if (dtype == DType::kFloat32) {
      std::memcpy(&single, weight, sizeof single);
      value = single;
    } else if (dtype == DType::kBFloat16) {
      std::memcpy(&half, weight, sizeof half);
      const uint32_t bits = uint32_t{half} << 16;
      std::memcpy(&single, &bits, sizeof single);
      value = single;
    } else {
      return kInvalidArgument;  // the core scales these in float32, or in its own kernel
    }
    comm->weights.push_back(value);
    *op = 4 + static_cast<int>(comm->weights.size());
    return 0;
  });
}
Result ncclRedOpDestroy(RedOp, Comm) { return 0; }

Result ncclCommRegister(const Comm comm, void* memory, size_t bytes, void** handle) {
  return check::call("ncclCommRegister", [&](Hardware&) -> int {
    *handle = comm->registered.add(memory, bytes);
    return *handle ? 0 : kInvalidArgument;
  });
}
Result ncclCommDeregister(const Comm comm, void* handle) {
  return check::call("ncclCommDeregister", [&](Hardware&) -> int {
    return comm->registered.drop(handle) ? 0 : kInvalidArgument;
  });
}
// Without blocking: async_error says "in progress" for a while, and the window is there at once.
Result ncclCommWindowRegister(Comm comm, void* memory, size_t bytes, nccl::Window* window,
                              int flags) {
  return check::call("ncclCommWindowRegister", [&](Hardware&) -> int {
    if (flags != nccl::kWindowSymmetric) return kInvalidArgument;
    *window = static_cast<nccl::Window>(comm->registered.add(memory, bytes));
    if (!*window) return kInvalidArgument;
    comm->connected = false;
    comm->polls = 2;
    return nccl::kInProgress;
  });
}
Result ncclCommWindowDeregister(Comm comm, nccl::Window window) {
  return check::call("ncclCommWindowDeregister", [&](Hardware&) -> int {
    return comm->registered.drop(window) ? 0 : kInvalidArgument;
  });
}

Result ncclGroupStart() {
  ++depth;
  return 0;
}
Result ncclGroupEnd() {
  return check::call("ncclGroupEnd", [&](Hardware& hardware) -> int {
    if (--depth > 0) return 0;
    std::map<std::pair<Comm, cuda::Stream>, std::vector<Call>> launches;
    for (const Pending& one : pending) launches[{one.comm, one.stream}].push_back(one.call);
    pending.clear();
    for (auto& [key, calls] : launches) start(hardware, key.first, key.second, std::move(calls));
    return 0;
  });
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
