// SPDX-License-Identifier: Apache-2.0
// A run: consecutive parts of one kind, which schedules cut into blocks together, window by window.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "base/types.h"
#include "data/backend/backend.h"

namespace farandole {

// The `widening` for fill_window() of bytes that keep their size.
constexpr size_t as_it_is(const Part&) { return 1; }

// How far one sequence of bytes of a run has been scheduled.
struct PartLane {
  size_t part = 0;  // index in the bucket
  int piece = 0;
  size_t offset = 0;  // in the piece
};

class PartRun {
 public:
  // Limits a run, and so a block, to keep a step short even with thousands of tiny tensors.
  static constexpr size_t kMostParts = 1024;

  explicit PartRun(int members) : members_(members) {}

  // `parts` must stay valid until the last fill_window().
  void start(std::span<const Part> parts) { parts_ = parts, begin_ = end_ = 0; }
  // Starts the next run of parts of one kind; false: no parts are left.
  template <class KindOf>
  bool open(KindOf&& kind_of) {
    if (end_ == parts_.size()) return false;
    begin_ = end_;
    const size_t most = std::min(parts_.size(), begin_ + kMostParts);
    while (end_ < most && kind_of(parts_[end_]) == kind_of(parts_[begin_])) ++end_;
    return true;
  }

  const Part& operator[](size_t part) const { return parts_[part]; }
  const Part& front() const { return parts_[begin_]; }
  PartLane lane() const { return {.part = begin_}; }
  bool ended(const PartLane& lane) const { return lane.part == end_; }

  // Schedules the next `window` bytes of a lane: calls emit(lane, offset in the window, bytes) for each
  // contiguous range. `widening(part)`: bytes in the window per byte of the part. Returns the bytes of the
  // window that are used.
  template <class Widening, class PieceBytes, class Emit>
  size_t fill_window(PartLane& lane, size_t window, Widening&& widening, PieceBytes&& piece_bytes,
                     Emit&& emit) const {
    size_t used = 0;
    while (!ended(lane)) {
      const Part& part = parts_[lane.part];
      const PartLayout layout(part, members_);
      const size_t piece = piece_bytes(layout, lane);
      if (lane.offset < piece) {
        const size_t scale = widening(part), element = size_of(part.signature.dtype);
        const size_t start = round_up(used, element * scale);
        if (start + element * scale > window) break;
        const size_t fits = (window - start) / (element * scale) * element;
        const size_t bytes = std::min(piece - lane.offset, fits);
        emit(lane, start, bytes);
        used = start + bytes * scale;
        lane.offset += bytes;
        if (lane.offset < piece) break;
      }
      lane.offset = 0;
      if (++lane.piece < layout.pieces()) continue;
      lane.piece = 0;
      ++lane.part;
    }
    return used;
  }

 private:
  const int members_;
  std::span<const Part> parts_;
  size_t begin_ = 0, end_ = 0;  // of the run, as part indices
};

}  // namespace farandole
