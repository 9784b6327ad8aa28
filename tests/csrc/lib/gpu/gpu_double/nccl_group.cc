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
  hardware.push(stream, ready, [launch, ends, aborted = comm->aborted] {
    if (*aborted) return;
    for (const End& end : ends) deliver(end);
    if (!launch) return;
    run(*launch);
    launch->kept.clear();
  });
}

}  // namespace

Result at_end(Hardware& hardware, Comm comm, std::function<Result()> job) {
  open_group.jobs.push_back(std::move(job));
  if (open_group.depth == 0) return finish_group(hardware);
  open_group.used.try_emplace(comm, comm);
  return nccl::kSuccess;
}

Result block(Hardware& hardware, Comm comm, const std::function<bool()>& ready) {
  for (;; hardware.pause()) {
    if (comm->abort_raised) return kInternalError;
    const auto broken = broken_ranks.find(comm->rank);
    if (broken != broken_ranks.end()) return broken->second;
    if (ready()) return nccl::kSuccess;
  }
}

// What a group, or a call alone, has gathered: in the caller's thread (2.28.9 src/group.cc:726).
Result finish_group(Hardware& hardware) {
  std::map<std::pair<Comm, cuda::Stream>, std::vector<Call>> launches;
  for (const Pending& one : std::exchange(open_group.calls, {})) {
    launches[{one.comm, one.stream}].push_back(one.call);
  }
  for (const auto& job : std::exchange(open_group.jobs, {})) {
    if (const Result error = job()) return error;
  }
  for (const auto& [key, calls] : launches) {
    const auto [comm, stream] = key;
    const auto may_go = [&hardware] { return !hardware.launches_held; };
    if (const Result error = block(hardware, comm, may_go)) return error;
    start(hardware, comm, stream, calls);
  }
  return nccl::kSuccess;
}

OneThread::OneThread(Comm comm) : user_(comm->user) {
  std::thread::id nobody;
  const std::thread::id me = std::this_thread::get_id();
  outermost_ = user_->compare_exchange_strong(nobody, me);
  if (outermost_ || nobody == me) return;
  std::fprintf(stderr, "NCCL double: two threads use a communicator at once\n");
  std::abort();
}

OneThread::~OneThread() {
  if (outermost_) *user_ = std::thread::id();
}

}  // namespace farandole::check
