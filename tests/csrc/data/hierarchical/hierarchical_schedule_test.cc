// SPDX-License-Identifier: Apache-2.0
// The cuts of buckets across hosts, without a byte of them: sizes that no test could hold in memory.
#include "data/hierarchical/hierarchical_schedule.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "base/error.h"
#include "check.h"

using namespace farandole;
using namespace farandole::check;

namespace {

Part bytes_part(Op op, int64_t bytes) {
  static std::byte somewhere{};
  Part part;
  part.signature.op = op;
  part.signature.dtype = DType::kUInt8;
  part.signature.shape = {bytes};
  part.input = part.output = &somewhere;
  return part;
}

HostMap hosts_of(int hosts, int ranks) {
  std::vector<int> host;
  for (int i = 0; i < hosts * ranks; ++i) host.push_back(i / ranks);
  return HostMap(host);
}

// The pieces of all blocks, in order, are the whole tensor; every message fits MPI's count.
void covers(const HostMap& hosts, const Part& part) {
  HierarchicalSchedule plan(hosts, hosts.members() - 1, {});
  plan.start({&part, 1});
  HierarchicalBlock block;
  size_t next = 0;
  while (plan.next(block)) {
    for (const Chunk& chunk : block.chunks) {
      CHECK(chunk.wide_bytes <= HierarchicalSchedule::kMostBlockBytes);
      for (const Piece& piece : block.of(chunk)) {
        CHECK_EQ(piece.input, next);
        CHECK_EQ(piece.output, next);
        next += piece.bytes;
      }
    }
  }
  CHECK_EQ(next, part.signature.bytes());
}

}  // namespace

TEST(tensors_of_more_than_4_gib) {
  constexpr int64_t kBytes = (int64_t{5} << 30) + 3;
  covers(hosts_of(2, 1), bytes_part(Op::kAllreduce, kBytes));
  covers(hosts_of(3, 2), bytes_part(Op::kAllreduce, kBytes));
  Part broadcast = bytes_part(Op::kBroadcast, kBytes);
  broadcast.signature.root = 0;
  covers(hosts_of(2, 1), broadcast);
}

TEST(no_message_is_longer_than_asked) {
  constexpr int64_t kBytes = 4 << 20;
  const HostMap hosts = hosts_of(2, 2);
  for (Op op :
       {Op::kAllreduce, Op::kBroadcast, Op::kAllgather, Op::kAlltoall, Op::kReducescatter}) {
    Part part = bytes_part(op, kBytes);
    if (op == Op::kBroadcast) part.signature.root = 0;
    if (op == Op::kAllgather) part.rows.assign(4, kBytes);
    if (op == Op::kAlltoall) part.rows.assign(16, kBytes / 4);
    if (op == Op::kReducescatter) part.rows.assign(4, kBytes / 4);
    const HierarchicalSchedule::Sizes sizes;
    HierarchicalSchedule plan(hosts, 0, sizes);
    plan.start({&part, 1});
    HierarchicalBlock block;
    size_t longest = 0;
    while (plan.next(block)) {
      for (const Chunk& chunk : block.chunks) longest = std::max(longest, chunk.wide_bytes);
    }
    CHECK_EQ(longest, sizes.most_chunk);
  }
}

// With more hosts than chunks in a block, each combines as much as any other in the long run, and so
// does each of its ranks.
TEST(homes_take_turns) {
  constexpr int kHosts = 40, kRanks = 4, kBlocks = 400;
  const HostMap hosts = hosts_of(kHosts, kRanks);
  HierarchicalSchedule plan(hosts, 0, {64 * 1024, 4096, 1024});
  const Part part = bytes_part(Op::kAllreduce, int64_t{kBlocks} * 64 * 1024);
  std::vector<int> chunks(static_cast<size_t>(hosts.members()));
  HierarchicalBlock block;
  plan.start({&part, 1});
  while (plan.next(block)) {
    for (const Chunk& chunk : block.chunks) {
      ++chunks[static_cast<size_t>(chunk.combiner(hosts, chunk.home))];
    }
  }
  const auto [fewest, most] = std::minmax_element(chunks.begin(), chunks.end());
  CHECK_EQ(std::accumulate(chunks.begin(), chunks.end(), 0), kBlocks * 16);
  CHECK_EQ(*fewest, *most);
}
