// SPDX-License-Identifier: Apache-2.0
// Carries reports to the leader of a host, and log entries to the ranks of the host, over two rings in shared memory
// per rank. There are no locks, so a rank may die at any point. No function blocks, even if a ring is full.
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/types.h"
#include "control/protocol/codec.h"
#include "lib/ipc/event_count.h"
#include "lib/ipc/ring.h"

namespace farandole {

class ShmLayout {
 public:
  // `bells` has one element per local rank. It is empty if no rank sleeps in a Poller.
  ShmLayout(std::byte* memory, int ranks, std::span<const Bells> bells = {})
      : memory_(memory), ranks_(ranks), bells_(bells) {}
  static size_t bytes_needed(int ranks);

  Wakeup wakeup(int local) const;
  std::vector<Wakeup> wakeups() const;
  std::byte* up(int local) const;    // ring for reports, from the rank to the leader
  std::byte* down(int local) const;  // ring for the log, from the leader to the rank

  static constexpr size_t kRingBytes = 256 << 10;

 private:
  std::byte* area(int local) const;
  std::byte* memory_;
  int ranks_;
  std::span<const Bells> bells_;
};

// Sends messages of any length over a ring. Cuts long messages into pieces. Pieces that do not fit wait in a queue.
class MessageWriter {
 public:
  explicit MessageWriter(std::byte* ring) : ring_(ring, ShmLayout::kRingBytes) {}
  void push(ByteView message);
  void flush();
  // True if a queued piece may now fit into the ring. May be called from any thread.
  bool can_flush() const { return waiting_.load() && ring_.room_granted(); }
  // True if the ring holds everything, so that the reader needs this process no longer. May be called from any thread.
  bool delivered() const { return !waiting_.load(); }

 private:
  void push_piece(std::byte mark, ByteView piece);
  bool move_queue();

  RingWriter ring_;
  std::deque<ByteString> queue_;
  std::atomic<bool> waiting_{false};  // true if the queue is not empty
};

class MessageReader {
 public:
  explicit MessageReader(std::byte* ring) : ring_(ring, ShmLayout::kRingBytes) {}
  // Returns the next message, valid until the next call, or nullopt if there is none. If it sets `room`, wake the
  // writer.
  std::optional<ByteView> next(bool& room);
  bool empty() const { return ring_.empty(); }

 private:
  RingReader ring_;
  ByteString pieces_;     // the pieces of a long message that have arrived so far
  ByteString assembled_;  // the last message, if it was a long one
  bool held_ = false;     // true if the last message is still in the ring
};

// A rank's end of the rings. Sends reports and receives log entries.
class MemberChannel {
 public:
  MemberChannel(const ShmLayout& layout, int local);
  // Sends one report. Call wake_leader() afterwards. The caller must hold RankCalls::mutex_.
  void report(ByteView message) { up_.push(message); }
  void wake_leader() { leader_wakeup_.notify(); }
  // Sends the reports for which the ring had no room before. The caller must hold RankCalls::mutex_.
  void flush() { up_.flush(); }
  bool can_flush() const { return up_.can_flush(); }
  // Returns the next log entry, valid until the next call, or nullopt if there is none. For the driver only.
  std::optional<ByteView> next_entry();
  bool has_entry() const { return !down_.empty(); }

 private:
  MessageWriter up_;
  MessageReader down_;
  Wakeup leader_wakeup_;
};

// The leader's end of all rings of its host. Only the driver of the leader's rank may use it.
class LeaderChannel {
 public:
  using OnReport = std::function<void(Rank, ByteView)>;
  using OnBroken = std::function<void(Rank, const Error&)>;
  // ranks[i] is the world rank of local rank i.
  LeaderChannel(const ShmLayout& layout, const std::vector<Rank>& ranks);
  // Passes reports that have arrived to `hear`, and ranks with corrupt rings to `lose`. Does not access a corrupt ring
  // again. Returns false if there was nothing to do.
  bool drain(const OnReport& hear, const OnBroken& lose);
  void publish(ByteView entry);
  // Wakes members that have entries to read or room to write. Call this after a batch of entries.
  void wake_members();
  bool has_report() const;
  bool delivered() const;  // to all members; see MessageWriter

 private:
  struct Member {
    Member(Rank world_rank, Wakeup its_wakeup, std::byte* up_ring, std::byte* down_ring)
        : rank(world_rank), wakeup(its_wakeup), up(up_ring), down(down_ring) {}
    Rank rank;
    Wakeup wakeup;
    MessageReader up;
    MessageWriter down;
    bool ring = false;  // wake_members() must wake this member
    // True if the ring is corrupt.
    std::atomic<bool> up_broken{false};
    std::atomic<bool> down_broken{false};
  };
  template <class Work>
  void guarded(Member& member, std::atomic<bool>& broken, Work&& work);
  std::deque<Member> members_;
  std::vector<std::pair<Rank, Error>> broken_;  // ranks that drain() has not yet passed to `lose`
};

}  // namespace farandole
