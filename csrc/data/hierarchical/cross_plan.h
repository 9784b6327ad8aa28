// SPDX-License-Identifier: Apache-2.0
// Cuts a bucket into blocks for several hosts, and each block into chunks: the unit that crosses the
// wire. Shapes, rows and members alone decide: every member cuts alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "data/hierarchical/host_map.h"
#include "data/plane/part_run.h"
#include "data/plane/plane.h"

namespace farandole {

// Contiguous elements of one part inside one chunk.
struct Piece {
  uint32_t part;  // index in the bucket
  size_t wide;    // where partial results of it lie, from the chunk's start
  size_t packed;  // where inputs and results of it lie, from the chunk's start
  size_t input;   // from Part::input of the member that contributes it
  size_t output;  // from this member's Part::output
  size_t bytes;
};

// What becomes of a chunk: on every host that has inputs, the reducer makes one partial result of them
// and sends it to the combiners; a combiner makes the result and sends it to the relays of the hosts
// that need it and have none. Reducer, combiner and relay of a host are one member, its worker, unless
// the chunk has one sender or one receiver.
struct Chunk {
  static constexpr int kAll = -1;

  int sender = kAll;    // member whose input it is; kAll: the inputs of all are reduced
  int receiver = kAll;  // member
  int home = kAll;      // the host that combines for all; kAll: each that needs it, for itself
  int stripe = 0;
  size_t begin = 0;  // in the slot; a multiple of 16
  size_t wide_bytes = 0;
  size_t packed_bytes = 0;
  uint32_t first = 0, last = 0;  // pieces of the block

  bool reduces() const { return sender == kAll; }
  int reducer(const HostMap& hosts, int host) const;
  int combiner(const HostMap& hosts, int host) const;
  // Whether members of the host wait for the result. A sender's neighbours read what it has staged.
  bool needed_on(const HostMap& hosts, int host) const;
  bool combined_on(const HostMap& hosts, int host) const {
    return (home == kAll || home == host) && needed_on(hosts, host);
  }
};

struct CrossBlock {
  std::vector<Piece> pieces;
  std::vector<Chunk> chunks;

  std::span<const Piece> of(const Chunk& chunk) const {
    return std::span(pieces).subspan(chunk.first, chunk.last - chunk.first);
  }
  void clear() { pieces.clear(), chunks.clear(); }
};

class CrossPlan {
 public:
  // Chunks that all hosts need begin at cache lines.
  static constexpr size_t kAlignment = 64;
  // No message is longer than a block, and MPI counts by int.
  static constexpr size_t kMostBlockBytes = size_t{1} << 30;

  // Alike on all members.
  struct Sizes {
    size_t block_bytes = 256 * 1024;  // a multiple of kAlignment, at least kAlignment * members
    size_t least_chunk = 512;         // a multiple of kAlignment
    size_t direct_bytes = 16 * 1024;  // a host may send this much to all others, to save a hop
    size_t most_chunk = 48 * 1024;    // a multiple of kAlignment: as the wire wants it
  };

  // `hosts` must outlive it.
  CrossPlan(const HostMap& hosts, int member, const Sizes& sizes);

  // Throws kInternal when a part contradicts itself. `parts` must outlive the last next().
  void start(std::span<const Part> parts);
  // Fills the next block; false: there is none.
  bool next(CrossBlock& block);

 private:
  enum class Kind { kAllreduce, kReducescatter, kShare, kAlltoall, kBarrier };
  struct Segment {  // contiguous elements in a window, before it is cut into chunks
    uint32_t part;
    size_t slot, input, output, bytes;
    size_t scale;  // bytes of a partial result for each byte of input
    int receiver;
  };

  static Kind kind_of(const Signature& signature);
  bool fill(CrossBlock& block);
  bool fill_allreduce(CrossBlock& block);
  bool fill_reducescatter(CrossBlock& block);
  bool fill_share(CrossBlock& block);
  bool fill_alltoall(CrossBlock& block);
  bool fill_barrier(CrossBlock& block);
  size_t next_window(std::vector<int>& senders);
  size_t take_sent(int sender, size_t window);
  void cut(CrossBlock& block, Chunk chunk, size_t begin, size_t end) const;
  void cut_range(CrossBlock& block, const Chunk& chunk, size_t begin, size_t end) const;
  void cut_stripes(CrossBlock& block, Chunk chunk, size_t begin, size_t bytes,
                   std::span<const int> homes);

  const HostMap& hosts_;
  const int member_;
  const Sizes sizes_;
  PartRun run_;
  Kind kind_ = Kind::kBarrier;
  std::vector<PartLane> lanes_;  // one for each sender; reductions have one
  std::vector<Segment> segments_;
  std::vector<int> senders_, homes_;
  size_t turn_ = 0;  // of the homes, over all buckets
};

}  // namespace farandole
