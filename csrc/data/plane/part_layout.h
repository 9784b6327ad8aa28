// SPDX-License-Identifier: Apache-2.0
// Where the members' bytes lie in the buffers of one part. Shapes and rows alone decide.
#pragma once

#include <cstddef>
#include <cstdint>

#include "data/plane/plane.h"
#include "kernels/kernels.h"

namespace farandole {

// Of a reduction: Average divides.
kernels::Factors factors_of(const Part& part);

class PartLayout {
 public:
  PartLayout(const Part& part, int members) : part_(part), members_(members) {}

  // Throws kInternal when rows, root, presence and `member`'s buffers contradict each other.
  void check(int member) const;

  // Reducescatter: what `owner` keeps of the sum, and where it starts in every input.
  size_t share_bytes(int owner) const { return row_bytes() * rows(owner); }
  size_t share_start(int owner) const;
  size_t longest_share() const;

  // Broadcast, allgather and alltoall: a sender's input is sent in pieces, each to one member or to all.
  int pieces() const { return part_.signature.op == Op::kAlltoall ? members_ : 1; }
  size_t piece_bytes(int sender, int piece) const;
  // The member that a piece goes to; kEverybody. An alltoall ends with the piece that the sender keeps,
  // and begins with the next member's, so that not all send to one member at a time.
  int receiver(int sender, int piece) const;
  size_t piece_start(int sender, int receiver) const;    // in the sender's input
  size_t landing_start(int sender, int receiver) const;  // in the receiver's output

  static constexpr int kEverybody = -1;

 private:
  size_t rows(int index) const {
    return static_cast<size_t>(part_.rows[static_cast<size_t>(index)]);
  }
  size_t row_bytes() const;
  size_t input_bytes(int member) const;
  void check_rows() const;

  const Part& part_;
  const int members_;
};

}  // namespace farandole
