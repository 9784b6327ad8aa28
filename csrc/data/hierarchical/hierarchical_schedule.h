// SPDX-License-Identifier: Apache-2.0
// Cuts a bucket into blocks, and each block into chunks, one per message between hosts. All members make the same cuts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "data/backend/backend.h"
#include "data/hierarchical/host_map.h"

namespace farandole {

// Contiguous elements of one part in one chunk.
struct Piece {
  uint32_t part;  // index in the bucket
  size_t wide;    // offset of the partial results from the chunk's start
  size_t packed;  // offset of the inputs and results from the chunk's start
  size_t input;   // offset in Part::input of the contributing member
  size_t output;  // offset in this member's Part::output
  size_t bytes;
};

// On every host that has inputs to a chunk, the reducer makes a partial result and sends it to the combiners. A
// combiner makes the result and sends it to relays on the other hosts that need the result. If the chunk has a stripe,
// the stripe's worker on each host has all three tasks. Without a stripe, these tasks are done by the sender, by the
// receiver or, on other hosts, by worker(host, local_of(receiver)).
struct Chunk {
  static constexpr int kAll = -1;

  int sender = kAll;    // the only member with input; kAll if the inputs of all members are reduced
  int receiver = kAll;  // the only member with a result; kAll if all members get the result
  int home = kAll;      // the only host that combines; kAll if each host that needs the result does
  int stripe = kAll;    // kAll if the chunk has no stripe
  size_t begin = 0;     // offset in the slot; a multiple of 16
  size_t wide_bytes = 0;
  size_t packed_bytes = 0;
  uint32_t first = 0, last = 0;  // range of the block's pieces

  bool reduces() const { return sender == kAll; }
  int reducer(const HostMap& hosts, int host) const;
  int combiner(const HostMap& hosts, int host) const;
  // True if the host's members need the result. False on the only sender's host, where members read the staged bytes.
  bool needed_on(const HostMap& hosts, int host) const;
  bool combined_on(const HostMap& hosts, int host) const {
    return (home == kAll || home == host) && needed_on(hosts, host);
  }
};

struct HierarchicalBlock {
  std::vector<Piece> pieces;
  std::vector<Chunk> chunks;

  std::span<const Piece> of(const Chunk& chunk) const {
    return std::span(pieces).subspan(chunk.first, chunk.last - chunk.first);
  }
  void clear() { pieces.clear(), chunks.clear(); }
};

class HierarchicalSchedule {
 public:
  // Chunks that all hosts need start at multiples of this size, which is a cache line.
  static constexpr size_t kAlignment = 64;
  // Also limits a message's size, which MPI takes as an int.
  static constexpr size_t kMostBlockBytes = size_t{1} << 30;

  // These sizes must be the same on all members.
  struct Sizes {
    size_t block_bytes = 256 * 1024;  // a multiple of kAlignment, at least kAlignment * members
    size_t least_chunk = 512;         // a multiple of kAlignment
    size_t direct_bytes = 16 * 1024;  // up to this size, hosts send directly to all others
    size_t most_chunk = 48 * 1024;    // a multiple of kAlignment; see Wire::most_bytes()
  };

  // `hosts` must outlive this object.
  HierarchicalSchedule(const HostMap& hosts, int member, const Sizes& sizes);

  // Throws Error(kInternal) if a part is inconsistent. `parts` must stay valid until the last next().
  void start(std::span<const Part> parts);
  // Returns false if there is no next block.
  bool next(HierarchicalBlock& block);

 private:
  enum class Kind { kAllreduce, kReducescatter, kShare, kAlltoall };
  struct Section {  // contiguous elements in a window, before the window is cut into chunks
    uint32_t part;
    size_t slot, input, output, bytes;
    size_t scale;  // bytes of partial result for each byte of input
    int receiver;
  };

  static Kind kind_of(const Signature& signature);
  bool fill(HierarchicalBlock& block);
  bool fill_allreduce(HierarchicalBlock& block);
  bool fill_reducescatter(HierarchicalBlock& block);
  bool fill_share(HierarchicalBlock& block);
  bool fill_alltoall(HierarchicalBlock& block);
  size_t next_window(std::vector<int>& senders);
  size_t take_sent(int sender, size_t window);
  void cut(HierarchicalBlock& block, Chunk chunk, size_t begin, size_t end) const;
  void cut_range(HierarchicalBlock& block, const Chunk& chunk, size_t begin, size_t end) const;
  void cut_stripes(HierarchicalBlock& block, Chunk chunk, size_t begin, size_t bytes,
                   std::span<const int> homes);

  const HostMap& hosts_;
  const int member_;
  const Sizes sizes_;
  PartRun run_;
  Kind kind_ = Kind::kAllreduce;
  std::vector<PartLane> lanes_;  // one per sender; reductions use only the first
  std::vector<Section> sections_;
  std::vector<int> senders_, homes_;
  size_t turn_ = 0;  // number of homes that have had a turn, counted over all buckets
};

}  // namespace farandole
