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
  PartLayout(const Part& part, int members)
      : part_(part), traits_(part.signature.traits()), members_(members) {}

  // Throws kInternal when rows, root, presence and `member`'s buffers contradict each other.
  void check(int member) const;

  // Reducescatter: what `owner` keeps of the sum, and where it starts in every input.
  size_t share_bytes(int owner) const { return row_bytes() * rows(owner); }
  size_t share_start(int owner) const;
  size_t longest_share() const;

  // Of a member that brings one, and of its result.
  size_t input_bytes(int member) const;
  size_t output_bytes(int member) const;

  // Where rows are told by pairs: what passes between two.
  size_t bytes_between(int sender, int receiver) const;

  // Where nothing is reduced: a sender's input is sent in pieces, each to one member or to all.
  int pieces() const { return meets_each() ? members_ : 1; }
  size_t piece_bytes(int sender, int piece) const;
  // The member that a piece goes to; kEverybody. Where each member gets another piece, the order ends with the piece that the sender keeps,
  // and begins with the next member's, so that not all send to one member at a time.
  int receiver(int sender, int piece) const;
  size_t piece_start(int sender, int receiver) const;    // in the sender's input
  size_t landing_start(int sender, int receiver) const;  // in the receiver's output

  static constexpr int kEverybody = -1;

 private:
  size_t rows(int index) const {
    return static_cast<size_t>(part_.rows[static_cast<size_t>(index)]);
  }
  bool meets_each() const { return traits_.rows == Rows::kPairs; }
  size_t row_bytes() const { return part_.signature.row_bytes(); }
  void check_rows() const;

  const Part& part_;
  const CollectiveTraits& traits_;
  const int members_;
};

}  // namespace farandole
