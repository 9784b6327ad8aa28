// SPDX-License-Identifier: Apache-2.0
// How reports reach the host's leader and log entries its ranks: one ring per rank and direction, in one
// segment that all ranks map. No locks, so a rank may die at any point; nothing blocks, not even a full ring.
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/types.h"
#include "control/protocol/codec.h"
#include "lib/ipc/event_count.h"
#include "lib/ipc/ring.h"

namespace farandole {

// Layout of the control segment of a host with `ranks` ranks.
class ShmLayout {
 public:
  ShmLayout(std::byte* memory, int ranks) : memory_(memory), ranks_(ranks) {}
  static size_t bytes_needed(int ranks);

  EventCount* wakeup(int local) const;
  std::vector<EventCount*> wakeups() const;
  std::byte* up(int local) const;    // reports: rank to leader
  std::byte* down(int local) const;  // log: leader to rank

  static constexpr size_t kRingBytes = 256 << 10;

 private:
  std::byte* area(int local) const;
  std::byte* memory_;
  int ranks_;
};

// Messages of any length over a ring; long ones are cut into pieces. A piece that finds no room is queued in
// private memory.
class MessageWriter {
 public:
  explicit MessageWriter(std::byte* ring) : ring_(ring, ShmLayout::kRingBytes) {}
  void push(ByteView message);
  void flush();
  // Whether something is queued and may fit now. Any thread.
  bool can_flush() const { return waiting_.load() && ring_.room_granted(); }

 private:
  void push_piece(std::byte mark, ByteView piece);
  bool move_queue();

  RingWriter ring_;
  std::deque<ByteString> queue_;
  std::atomic<bool> waiting_{false};  // something is queued
};

class MessageReader {
 public:
  explicit MessageReader(std::byte* ring) : ring_(ring, ShmLayout::kRingBytes) {}
  // The next message, valid until the next call; nullopt: none. `room`: the writer should be woken, since it
  // waits for the room made.
  std::optional<ByteView> next(bool& room);
  bool empty() const { return ring_.empty(); }

 private:
  RingReader ring_;
  ByteString pieces_;     // of a long message that is incomplete
  ByteString assembled_;  // a long message
  bool held_ = false;     // the last message is still in the ring
};

// Every rank's end: reports go out, log entries come in.
class MemberChannel {
 public:
  MemberChannel(const ShmLayout& layout, int local);
  // Sends one report; under RankCalls::mutex_. Does not wake the leader: see wake_leader().
  void report(ByteView message) { up_.push(message); }
  void wake_leader() { leader_wakeup_->notify(); }
  // Sends reports that found no room at first; under RankCalls::mutex_.
  void flush() { up_.flush(); }
  bool can_flush() const { return up_.can_flush(); }
  // The next log entry, valid until the next call; nullopt: none. The driver only.
  std::optional<ByteView> next_entry();
  bool has_entry() const { return !down_.empty(); }

 private:
  MessageWriter up_;
  MessageReader down_;
  EventCount* leader_wakeup_;
};

// The end at the host's leader. Only the driver of the leader's rank.
class LeaderChannel {
 public:
  using OnReport = std::function<void(Rank, ByteView)>;
  using OnBroken = std::function<void(Rank, const Error&)>;
  // ranks[i]: world rank of local rank i.
  LeaderChannel(const ShmLayout& layout, const std::vector<Rank>& ranks);
  // Tells all reports that have come, and which ranks' memory is corrupt and not accessed any more; false: nothing.
  bool drain(const OnReport& hear, const OnBroken& lose);
  void publish(ByteView entry);
  // Wakes the members for which publish() or drain() left something to do; call after a batch.
  void wake_members();
  bool has_report() const;

 private:
  struct Member {
    Member(Rank world_rank, EventCount* its_wakeup, std::byte* up_ring, std::byte* down_ring)
        : rank(world_rank), wakeup(its_wakeup), up(up_ring), down(down_ring) {}
    Rank rank;
    EventCount* wakeup;
    MessageReader up;
    MessageWriter down;
    bool ring = false;  // wake it: it has something to read, or room to write
    // Corrupt rings, which are not accessed again.
    std::atomic<bool> up_broken{false};
    std::atomic<bool> down_broken{false};
  };
  template <class Work>
  void guarded(Member& member, std::atomic<bool>& broken, Work&& work);
  std::deque<Member> members_;
  std::vector<std::pair<Rank, Error>> broken_;  // not yet told
};

}  // namespace farandole
