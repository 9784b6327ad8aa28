// SPDX-License-Identifier: Apache-2.0
// Where the members' bytes are in the buffers of one part, computed from shapes and rows only.
#pragma once

#include <cstddef>

#include "data/backend/backend.h"
#include "kernels/kernels.h"

namespace farandole {

// The factors and divisor of a reduction.
kernels::Factors factors_of(const Part& part);

class PartLayout {
 public:
  PartLayout(const Part& part, int members)
      : part_(part), traits_(part.signature.traits()), members_(members) {}

  // Throws kInternal if rows, root, presence and `member`'s buffers are inconsistent.
  void check(int member) const;

  // Patterns that reduce to owners: the part of the sum that `owner` keeps, and its offset in every input.
  size_t share_bytes(int owner) const { return row_bytes() * rows(owner); }
  size_t share_start(int owner) const;
  size_t longest_share() const;

  // Size of a member's input, if it has one, and of its result.
  size_t input_bytes(int member) const;
  size_t output_bytes(int member) const;

  // For Rows::kPairs: bytes that `sender` sends to `receiver`.
  size_t bytes_between(int sender, int receiver) const;

  // Without reduction, an input is sent in pieces, each to one member or to all.
  int pieces() const { return meets_each() ? members_ : 1; }
  size_t piece_bytes(int sender, int piece) const;
  // The member that a piece is for, or kEverybody. If each gets another piece, a sender begins with the next
  // member and ends with itself, so that not all send to the same member at once.
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
