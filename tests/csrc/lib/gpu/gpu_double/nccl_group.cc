// SPDX-License-Identifier: Apache-2.0
#include "lib/gpu/gpu_double/nccl_group.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

namespace farandole::check {

using nccl::Comm;
using nccl::Result;

thread_local OpenGroup open_group;
std::map<int, Result> broken_ranks;

namespace {

// One end of a transfer, as a stream comes to it.
struct End {
  Call call;
  std::shared_ptr<Transfer> transfer;
  uint64_t number;
};

bool comes_to(const NcclFiles* files, const End& end) {
  Transfer& transfer = *end.transfer;
  const bool sends = end.call.what == What::kSend;
  if (sends && !transfer.sent) {
    transfer.bytes.assign(end.call.input, end.call.input + bytes_of(end.call));
  }
  if (files) {
    return sends ? files->send(end.call.peer, end.number, transfer)
                 : files->receive(end.call.peer, end.number, transfer);
  }
  (sends ? transfer.sent : transfer.awaited) = true;
  return transfer.sent && transfer.awaited;
}

void deliver(const End& end) {
  if (end.call.what == What::kSend) return;
  const std::vector<std::byte>& bytes = end.transfer->bytes;
  if (bytes.size() != bytes_of(end.call)) {
    std::fprintf(stderr, "NCCL double: a receive of %zu bytes meets a send of %zu\n",
                 bytes_of(end.call), bytes.size());
    std::abort();
  }
  if (!bytes.empty()) std::memcpy(end.call.output, bytes.data(), bytes.size());
}

std::vector<End> ends_of(Comm comm, const std::vector<Call>& calls) {
  std::vector<End> ends;
  for (const Call& call : calls) {
    if (call.what < What::kSend) continue;
    const bool sends = call.what == What::kSend;
    const uint64_t number = (sends ? comm->sent : comm->received)[call.peer]++;
    const auto key = sends ? std::tuple(comm->rank, call.peer, number)
                           : std::tuple(call.peer, comm->rank, number);
    // Between processes each has its own copy, but for a rank's word to itself.
    auto& shared = comm->group->transfers[key];
    if (!shared) shared = std::make_shared<Transfer>();
    ends.push_back({call, shared, number});
  }
  return ends;
}

// Collectives and transfers of one group: one kernel.
void start(Hardware& hardware, Comm comm, cuda::Stream stream, const std::vector<Call>& calls) {
  const auto ranks = static_cast<size_t>(comm->group->ranks);
  const auto rank = static_cast<size_t>(comm->rank);
  std::vector<End> ends = ends_of(comm, calls);
  std::shared_ptr<Launch> launch;
  uint64_t number = 0;
  for (const Call& call : calls) {
    if (call.what >= What::kSend) continue;
    if (!launch) {
      number = comm->launches++;
      auto& shared = comm->group->launches[number];
      if (!shared) shared = std::make_shared<Launch>(ranks);
      launch = shared;
    }
    launch->calls[rank].push_back(call);
  }
  const auto ready = [launch, rank, number, ends, aborted = comm->aborted, mine = comm->rank,
                      files = comm->files] {
    if (*aborted) return true;
    if (broken_ranks.contains(mine)) return false;
    bool all = true;
    for (const End& end : ends) all &= comes_to(files.get(), end);
    if (!launch) return all;
    if (files) return files->meet(number, *launch) && all;
    launch->arrived[rank] = true;
    for (bool arrived : launch->arrived) all &= arrived;
    return all;
  };
  ++*comm->under_way;
  hardware.push(stream, ready, [launch, ends, aborted = comm->aborted, left = comm->under_way] {
    --*left;
    if (*aborted) return;
    for (const End& end : ends) deliver(end);
    if (!launch) return;
    run(*launch);
    launch->kept.clear();
  });
}

// The windows of one group: one job, which ends when all ranks are in theirs.
void register_all(Hardware& hardware, Comm comm, const std::vector<PendingWindow>& windows) {
  const uint64_t number = ++comm->registrations;
  comm->group->registrations[number].insert(comm->rank);
  const auto all_in = [comm, number] {
    if (comm->files) return comm->files->meet_at("windows" + std::to_string(number));
    return static_cast<int>(comm->group->registrations[number].size()) == comm->group->ranks;
  };
  begin_job(hardware, comm, all_in, [comm, windows] {
    for (const PendingWindow& one : windows) {
      *one.window = static_cast<nccl::Window>(comm->registered.add(one.memory, one.bytes));
      if (!*one.window) comm->state = kInvalidArgument;
    }
  });
}

}  // namespace

// What a group, or a call alone, has gathered. A communicator of several ranks launches in a thread of NCCL's, whenever,
// not only the first time; one of a lone rank at once (2.28.9 src/group.cc:705, src/enqueue.cc:2569).
Result launch_pending(Hardware& hardware) {
  Result result = nccl::kSuccess;
  std::map<Comm, std::vector<PendingWindow>> windows;
  for (const PendingWindow& one : std::exchange(open_group.windows, {}))
    windows[one.comm].push_back(one);
  for (const auto& [comm, some] : windows) {
    register_all(hardware, comm, some);
    result = nccl::kInProgress;
  }
  std::map<std::pair<Comm, cuda::Stream>, std::vector<Call>> launches;
  for (const Pending& one : std::exchange(open_group.calls, {})) {
    launches[{one.comm, one.stream}].push_back(one.call);
  }
  for (auto& [key, calls] : launches) {
    const auto [comm, stream] = key;
    if (comm->group->ranks == 1) {
      start(hardware, comm, stream, calls);
      continue;
    }
    begin_job(
        hardware, comm, [&hardware] { return !hardware.launches_held; },
        [&hardware, comm = comm, stream = stream, calls] { start(hardware, comm, stream, calls); });
    result = nccl::kInProgress;
  }
  return result;
}

}  // namespace farandole::check
