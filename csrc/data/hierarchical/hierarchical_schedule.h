// SPDX-License-Identifier: Apache-2.0
// Cuts a bucket into blocks, and blocks into chunks, the units of messages between hosts, alike on all members.
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
  size_t wide;    // offset of its partial results from the chunk's start
  size_t packed;  // offset of its inputs and results from the chunk's start
  size_t input;   // offset in Part::input of the member that contributes it
  size_t output;  // offset in this member's Part::output
  size_t bytes;
};

// Way of a chunk: on every host with inputs, the reducer makes a partial result and sends it to the combiners. A
// combiner makes the result and sends it to the relays of hosts that need it but do not combine. On a host all three
// are the same member: its worker for the chunk's stripe or, without a stripe, the chunk's only sender or receiver.
struct Chunk {
  static constexpr int kAll = -1;

  int sender = kAll;  // kAll: all members' inputs are reduced
  int receiver = kAll;
  int home = kAll;  // the only host that combines; kAll: each that needs it
  int stripe = kAll;
  size_t begin = 0;  // in the slot; a multiple of 16
  size_t wide_bytes = 0;
  size_t packed_bytes = 0;
  uint32_t first = 0, last = 0;  // range of the block's pieces

  bool reduces() const { return sender == kAll; }
  int reducer(const HostMap& hosts, int host) const;
  int combiner(const HostMap& hosts, int host) const;
  // True if the host's members wait for the result. On a sender's host they read what it has staged.
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
  // Chunks that all hosts need start at cache lines.
  static constexpr size_t kAlignment = 64;
  // Also limits messages, whose size is an int in MPI.
  static constexpr size_t kMostBlockBytes = size_t{1} << 30;

  // Equal on all members.
  struct Sizes {
    size_t block_bytes = 256 * 1024;  // a multiple of kAlignment, at least kAlignment * members
    size_t least_chunk = 512;         // a multiple of kAlignment
    size_t direct_bytes = 16 * 1024;  // a host may send this much to all others, to save a hop
    size_t most_chunk = 48 * 1024;    // a multiple of kAlignment; see Wire::most_bytes()
  };

  // `hosts` must outlive this.
  HierarchicalSchedule(const HostMap& hosts, int member, const Sizes& sizes);

  // Throws kInternal if a part is inconsistent. `parts` must stay valid until the last next().
  void start(std::span<const Part> parts);
  // Fills the next block. False: there is none.
  bool next(HierarchicalBlock& block);

 private:
  enum class Kind { kAllreduce, kReducescatter, kShare, kAlltoall };
  struct Section {  // contiguous elements in a window, before it is cut into chunks
    uint32_t part;
    size_t slot, input, output, bytes;
    size_t scale;  // bytes of partial result per byte of input
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
  std::vector<PartLane> lanes_;  // one per sender; reductions use one
  std::vector<Section> sections_;
  std::vector<int> senders_, homes_;
  size_t turn_ = 0;  // in the rotation of homes, over all buckets
};

}  // namespace farandole
