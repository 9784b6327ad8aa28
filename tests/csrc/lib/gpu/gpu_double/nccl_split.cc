// SPDX-License-Identifier: Apache-2.0
// Communicators that are parts of another one.
#include <algorithm>
#include <cstring>
#include <utility>

#include "lib/gpu/gpu_double/gpu_double.h"
#include "lib/gpu/gpu_double/nccl_comm.h"

namespace farandole::check {
namespace {

int calls = 0;

// The id of what this split makes of the ranks with this color: the same on all of them.
nccl::UniqueId id_of_part(const ncclComm& comm, uint64_t split, int color) {
  nccl::UniqueId id = comm.id;
  uint64_t number = 0;
  std::memcpy(&number, id.bytes, sizeof number);
  number = number * 1'000'003 + split * 1009 + static_cast<uint64_t>(color) + 1;
  std::memcpy(id.bytes, &number, sizeof number);
  return id;
}

}  // namespace

// Once all ranks of the communicator are in its split, after as many launches: then it is there on each of them.
bool split_ends(Hardware& hardware, nccl::Comm comm, uint64_t number, nccl::Comm* part) {
  std::map<int, NcclPart>& said = comm->group->splits[number];
  if (comm->files) comm->files->hear(number, said);
  if (static_cast<int>(said.size()) < comm->group->ranks) return false;
  const NcclPart& own = said.at(comm->rank);
  std::vector<std::pair<int, int>> order;  // key and rank
  for (const auto& [rank, one] : said) {
    if (one.launches != own.launches) return false;  // never
    if (one.color == own.color) order.emplace_back(one.key, rank);
  }
  std::ranges::sort(order);
  const auto place = std::ranges::find(order, std::pair{own.key, comm->rank});
  *part = make_comm(hardware, id_of_part(*comm, number, own.color),
                    static_cast<int>(place - order.begin()), static_cast<int>(order.size()));
  return true;
}

extern "C" {

int gpu_double_splits() {
  auto lock = Hardware::instance().lock();
  return std::exchange(calls, 0);
}

// A collective call: it ends when all ranks are in it; until then there is no part (2.28.9 src/init.cc:2572, 2610). With
// work under way NCCL may hang; here it says so.
nccl::Result ncclCommSplit(nccl::Comm comm, int color, int key, nccl::Comm* part,
                           nccl::ConfigV21400*) {
  const OneThread alone(comm);
  return call("ncclCommSplit", [&](Hardware& hardware) -> int {
    if (comm->state != nccl::kSuccess) return comm->state;
    if (*comm->under_way > 0) return kInvalidUsage;
    if (color < 0) return kInvalidArgument;  // we make no use of NCCL_SPLIT_NOCOLOR
    const uint64_t number = ++comm->splits;
    *part = nullptr;
    const NcclPart own{color, key, comm->launches};
    comm->group->splits[number][comm->rank] = own;
    if (comm->files) comm->files->tell(number, own);
    ++calls;
    return at_end(hardware, comm, [&hardware, comm, number, part] {
      return block(hardware, comm, [&] { return split_ends(hardware, comm, number, part); });
    });
  });
}

}  // extern "C"
}  // namespace farandole::check
