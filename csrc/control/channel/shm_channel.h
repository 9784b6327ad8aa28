// SPDX-License-Identifier: Apache-2.0
// The channel inside a host: one ring per direction per rank, in one segment that all map. A rank may
// die anywhere: there is no lock in it. A full ring keeps its writer from nothing: what does not fit
// waits in the writer's private queue.
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <vector>

#include "control/channel/channel.h"
#include "lib/ipc/event_count.h"
#include "lib/ipc/ring.h"

namespace farandole {

// Where everything lies in the control segment of a host with `ranks` ranks.
class ShmLayout {
 public:
  ShmLayout(std::byte* memory, int ranks) : memory_(memory), ranks_(ranks) {}
  static size_t bytes_needed(int ranks);

  EventCount* bell(int local) const;
  std::vector<EventCount*> bells() const;
  std::byte* up(int local) const;    // reports: rank -> leader
  std::byte* down(int local) const;  // log: leader -> rank
  int ranks() const { return ranks_; }

  static constexpr size_t kRingBytes = 256 << 10;

 private:
  std::byte* area(int local) const;
  std::byte* memory_;
  int ranks_;
};

// Messages of any length over a ring: longer ones travel in pieces.
class MessageWriter {
 public:
  explicit MessageWriter(std::byte* ring) : queue_(RingWriter(ring, ShmLayout::kRingBytes)) {}
  void push(ByteView message);
  void flush();
  // Something waits and there may be room now. Any thread.
  bool can_flush() const { return waiting_.load() && queue_.room_granted(); }

 private:
  QueuedWriter queue_;
  std::atomic<bool> waiting_{false};
};

class MessageReader {
 public:
  explicit MessageReader(std::byte* ring) : ring_(ring, ShmLayout::kRingBytes) {}
  // The next message, valid until the next call; empty: none. `room`: the writer waits for a ring of
  // its bell.
  ByteView next(bool& room);
  bool empty() const { return ring_.empty(); }

 private:
  RingReader ring_;
  ByteString pieces_;     // of a long message that has not come whole
  ByteString assembled_;  // a long message
  bool held_ = false;     // the last message lies in the ring still
};

class ShmMember final : public MemberChannel {
 public:
  ShmMember(const ShmLayout& layout, int local);
  void report(ByteView message) override { up_.push(message); }
  void ring_leader() override { leader_bell_->notify(); }
  ByteView next_entry() override;
  bool has_entry() const override { return !down_.empty(); }
  void flush() override { up_.flush(); }
  bool can_flush() const override { return up_.can_flush(); }

 private:
  MessageWriter up_;
  MessageReader down_;
  EventCount* leader_bell_;
};

class ShmLeader final : public LeaderChannel {
 public:
  // ranks[i]: world rank of local rank i.
  ShmLeader(const ShmLayout& layout, std::vector<Rank> ranks);
  bool drain(const Visitor& visit) override;
  void publish(ByteView entry) override;
  void ring_members() override;
  bool has_report() const override;

 private:
  struct Member {
    Member(Rank world_rank, EventCount* its_bell, std::byte* up_ring, std::byte* down_ring)
        : rank(world_rank), bell(its_bell), up(up_ring), down(down_ring) {}
    Rank rank;
    EventCount* bell;
    MessageReader up;
    MessageWriter down;
    bool ring = false;  // it has something to read, or room to write
    // They hold nonsense, and are not touched again.
    std::atomic<bool> up_broken{false};
    std::atomic<bool> down_broken{false};
  };
  template <class Work>
  void guarded(Member& member, std::atomic<bool>& broken, Work&& work);
  std::deque<Member> members_;
  std::vector<Rank> broken_;  // not told yet
};

}  // namespace farandole
