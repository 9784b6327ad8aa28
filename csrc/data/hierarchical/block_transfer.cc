// SPDX-License-Identifier: Apache-2.0
#include "data/hierarchical/block_transfer.h"

#include <algorithm>

namespace farandole {

bool host_has(const Part& part, const HostMap& hosts, int host) {
  const std::vector<int>& members = hosts.members_of(host);
  return std::any_of(members.begin(), members.end(), [&](int member) { return part.has(member); });
}

struct BlockTransfer::Planner {
  BlockTransfer& transfer;
  const HostMap& hosts;
  const int member;
  const std::span<const Part> parts;
  const int host = hosts.host_of(member);

  size_t room(size_t bytes) {
    const size_t offset = transfer.arena_bytes;
    transfer.arena_bytes += round_up(bytes, HierarchicalSchedule::kAlignment);
    return offset;
  }

  bool contributes(const Chunk& chunk, int other) const {
    if (!chunk.reduces()) return other == hosts.host_of(chunk.sender);
    const auto pieces = transfer.block.of(chunk);
    return std::any_of(pieces.begin(), pieces.end(), [&](const Piece& piece) {
      return host_has(parts[piece.part], hosts, other);
    });
  }

  void add(uint32_t index) {
    const Chunk& chunk = transfer.block.chunks[index];
    ChunkTask task{.chunk = index};
    const bool combined_here = chunk.combined_on(hosts, host);
    task.reduces = contributes(chunk, host) && chunk.reducer(hosts, host) == member;
    task.combines = combined_here && chunk.combiner(hosts, host) == member;
    task.relays =
        !combined_here && chunk.needed_on(hosts, host) && chunk.combiner(hosts, host) == member;
    if (task.reduces) add_reduction(task, chunk);
    if (task.combines) add_combination(task, chunk);
    if (task.relays) {
      task.result = room(chunk.packed_bytes);
      const int from = chunk.combiner(hosts, chunk.home);
      transfer.results_in.add({from, index, task.result, chunk.packed_bytes});
    }
    if (task.reduces || task.combines || task.relays) transfer.tasks.push_back(task);
  }

  // Sends this host's partial result to the combiners on other hosts.
  void add_reduction(ChunkTask& task, const Chunk& chunk) {
    task.partial = room(chunk.wide_bytes);
    for (int other = 0; other < hosts.hosts(); ++other) {
      if (other == host || !chunk.combined_on(hosts, other)) continue;
      transfer.partials_out.add(
          {chunk.combiner(hosts, other), task.chunk, task.partial, chunk.wide_bytes});
    }
  }

  void add_combination(ChunkTask& task, const Chunk& chunk) {
    task.first_in = transfer.partials_in.messages().size();
    for (int other = 0; other < hosts.hosts(); ++other) {
      if (other == host || !contributes(chunk, other)) continue;
      const size_t offset = room(chunk.wide_bytes);
      transfer.partials_in.add({chunk.reducer(hosts, other), task.chunk, offset, chunk.wide_bytes});
      task.result = offset;  // if the chunk has only one sender, the sender's message is the result
    }
    task.last_in = transfer.partials_in.messages().size();
    if (chunk.reduces()) task.result = room(chunk.packed_bytes);
    if (chunk.home != host) return;
    for (int other = 0; other < hosts.hosts(); ++other) {
      if (other == host || !chunk.needed_on(hosts, other)) continue;
      transfer.results_out.add(
          {chunk.combiner(hosts, other), task.chunk, task.result, chunk.packed_bytes});
    }
  }
};

void BlockTransfer::plan(const HostMap& hosts, int member, std::span<const Part> parts) {
  tasks.clear();
  for (MessageQueue* queue : {&partials_in, &partials_out, &results_in, &results_out})
    queue->clear();
  arena_bytes = 0;
  Planner planner{*this, hosts, member, parts};
  for (uint32_t index = 0; index < block.chunks.size(); ++index) planner.add(index);
}

}  // namespace farandole
