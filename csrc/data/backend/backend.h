// SPDX-License-Identifier: Apache-2.0
// The interface of all backends, and the layout of a bucket's parts.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/types.h"
#include "kernels/kernels.h"

namespace farandole {

class GpuEvent;

// One tensor of a bucket, with this rank's buffers. "Member" is an index into the process set.
struct Part {
  Signature signature;               // `root` is a member, and `shape` is this rank's shape
  const std::byte* input = nullptr;  // nullptr if this rank contributes the identity or no rows
  std::byte* output = nullptr;       // nullptr if the result is dropped
  std::vector<bool> present;         // by member: true if it has an input; empty if all have one
  // See CollectiveTraits::rows.
  std::vector<int64_t> rows;
  int64_t divisor = 1;                 // for Average
  std::shared_ptr<GpuEvent> produced;  // GPU buffers must not be used before this event

  bool has(int member) const { return present.empty() || present[static_cast<size_t>(member)]; }
};

enum class Progress {
  kWaiting,   // a peer must act first and will wake this rank, or look_again() says when to check
  kMoved,     // bytes have moved; call step() again without waiting
  kFinished,  // the bucket is done: no peer accesses the bucket's buffers any more
};

// Measures the phases of a backend's blocks for the timeline. Costs nothing while no timeline is written.
enum class Phase { kStage, kReduce, kConsume };

struct PhaseWatch {
  const std::atomic<bool>* listening = nullptr;  // true while a timeline is written; may be null
  std::function<void(Phase, int64_t begin_ns, int64_t end_ns)> saw = {};

  template <class Work>
  void time(Phase phase, Work&& work) const {
    const bool listened = listening != nullptr && listening->load(std::memory_order_relaxed);
    const int64_t begin = listened ? now_ns() : 0;
    std::forward<Work>(work)();
    if (listened) saw(phase, begin, now_ns());
  }
};

// Moves the bytes of one process set in one kind of memory. All members pass the same buckets to their backends, in log
// order. Only the driver calls a backend, except for ready() and look_again(). Every caller holds Engine::work_mutex_.
//
// The driver calls begin(), then step() until it returns kFinished, then begin() for the next bucket. If step() throws,
// the driver must call abort(). Afterwards no peer accesses this rank's buffers, and step() must not be called again.
class Backend {
 public:
  virtual ~Backend() = default;
  // Starts a bucket. `parts` must stay valid until kFinished or abort().
  virtual void begin(std::span<const Part> parts) = 0;
  // Moves at most one block without blocking. Call between begin() and kFinished. Throws Error if the bucket is lost.
  virtual Progress step() = 0;
  // True if step() would make progress. The driver calls this before it sleeps. Has no side effects.
  virtual bool ready() const = 0;
  // Returns the time at which step() must be called even without a wake-up. Used if the wire cannot wake a thread.
  virtual Deadline look_again() const { return Deadline::never(); }
  // Drops the bucket in flight.
  virtual void abort() = 0;
  // Returns the number of bytes that rest() would free. Both functions may be called only between buckets. rest() frees
  // nothing while a peer reads the bytes.
  virtual size_t held() const { return 0; }
  virtual void rest() {}
};

// The kind of memory that a backend moves. A set may have a backend for each kind; their messages must not mix.
enum class Feeds { kHost, kGpu };

template <class A, class B>
bool overlap(A a, size_t a_bytes, B b, size_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

kernels::Factors factors_of(const Part& part);

// Computes the positions of members' bytes in the buffers of one part. Uses only shapes and rows.
class PartLayout {
 public:
  PartLayout(const Part& part, int members)
      : part_(part), traits_(part.signature.traits()), members_(members) {}

  // Throws Error(kInternal) if rows, root, presence and `member`'s buffers are inconsistent.
  void check(int member) const;

  // For kReduceToOwners: share_bytes() is the size of the share of the result that `owner` gets, and share_start() is
  // the share's offset in every input. No share is longer than an earlier one, because kept_rows() computes them.
  size_t share_bytes(int owner) const { return row_bytes() * rows(owner); }
  size_t share_start(int owner) const;

  size_t input_bytes(int member) const;
  size_t output_bytes(int member) const;

  // For Rows::kPairs: returns the number of bytes that `sender` sends to `receiver`.
  size_t bytes_between(int sender, int receiver) const;

  // If a part is not reduced, each input consists of pieces. A piece is sent to one member or to all members.
  int pieces() const { return meets_each() ? members_ : 1; }
  size_t piece_bytes(int sender, int piece) const;
  // Returns the member that gets a piece, or kEverybody. If each member gets a piece, a sender starts with the member
  // after itself and ends with itself, so that the senders do not all start with the same member.
  int receiver(int sender, int piece) const;
  size_t piece_start(int sender, int receiver) const;    // offset in the sender's input
  size_t landing_start(int sender, int receiver) const;  // offset in the receiver's output

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

// A `widening` for fill_window() that keeps all sizes.
constexpr size_t as_it_is(const Part&) { return 1; }

// A cursor into one sequence of a run's bytes. All bytes before the cursor have been scheduled.
struct PartLane {
  size_t part = 0;  // index in the bucket
  int piece = 0;
  size_t offset = 0;  // offset in the piece
};

// Consecutive parts of one kind. A schedule cuts these parts into blocks together, one window of bytes at a time.
class PartRun {
 public:
  // Maximum number of parts in a run, and therefore in a block. Keeps steps short even with thousands of tiny tensors.
  static constexpr size_t kMostParts = 1024;

  explicit PartRun(int members) : members_(members) {}

  // `parts` must stay valid until the last fill_window().
  void start(std::span<const Part> parts) { parts_ = parts, begin_ = end_ = 0; }
  // Starts the next run of parts of one kind. Returns false if no parts are left.
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

  // Schedules a lane's next `window` bytes: calls emit(lane, offset in the window, bytes) for each contiguous range.
  // `widening(part)` is the number of bytes in the window per byte of the part. Returns the number of bytes used.
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
  size_t begin_ = 0, end_ = 0;  // the run's range of part indices
};

}  // namespace farandole
