// SPDX-License-Identifier: Apache-2.0
#include "control/channel/shm_channel.h"

#include <algorithm>
#include <utility>

namespace farandole {
namespace {

constexpr std::byte kLast{0};
constexpr std::byte kMore{1};
constexpr size_t kMaxMessage = size_t{256} << 20;  // a longer message violates the protocol

constexpr size_t ring_area() { return (RingMemory::bytes(ShmLayout::kRingBytes) + 63) / 64 * 64; }

}  // namespace

size_t ShmLayout::bytes_needed(int ranks) {
  return static_cast<size_t>(ranks) * (sizeof(EventCount) + 2 * ring_area());
}

std::byte* ShmLayout::area(int local) const {
  return memory_ + static_cast<size_t>(local) * (sizeof(EventCount) + 2 * ring_area());
}

Wakeup ShmLayout::wakeup(int local) const {
  auto& count = *reinterpret_cast<EventCount*>(area(local));
  return bells_.empty() ? Wakeup(count) : Wakeup(count, bells_[static_cast<size_t>(local)]);
}

std::vector<Wakeup> ShmLayout::wakeups() const {
  std::vector<Wakeup> wakeups;
  for (int i = 0; i < ranks_; ++i) wakeups.push_back(wakeup(i));
  return wakeups;
}

std::byte* ShmLayout::up(int local) const { return area(local) + sizeof(EventCount); }
std::byte* ShmLayout::down(int local) const { return up(local) + ring_area(); }

void MessageWriter::push(ByteView message) {
  const size_t most = ring_.max_record() - 1;
  for (; message.size() > most; message = message.subspan(most)) {
    push_piece(kMore, message.first(most));
  }
  push_piece(kLast, message);
}

void MessageWriter::push_piece(std::byte mark, ByteView piece) {
  if (queue_.empty() && ring_.try_push({&mark, 1}, piece)) return;
  ByteString& queued = queue_.emplace_back(1, mark);
  queued.insert(queued.end(), piece.begin(), piece.end());
  flush();
}

void MessageWriter::flush() {
  bool left = !move_queue();
  if (left) {
    ring_.want_room();
    left = !move_queue();  // the reader may have made room before it saw the request
  }
  waiting_ = left;
}

// Moves queued pieces into the ring. Returns true if the queue is then empty.
bool MessageWriter::move_queue() {
  while (!queue_.empty() && ring_.try_push(queue_.front())) queue_.pop_front();
  return queue_.empty();
}

std::optional<ByteView> MessageReader::next(bool& room) {
  room = false;
  if (held_) room |= ring_.pop();
  held_ = false;
  assembled_.clear();
  for (;;) {
    ByteView record = ring_.front();
    if (record.empty()) return std::nullopt;  // keeps pieces_ for the next call
    ByteView body = record.subspan(1);
    if (record.front() == kLast && pieces_.empty()) {
      held_ = true;
      return body;
    }
    pieces_.insert(pieces_.end(), body.begin(), body.end());
    if (pieces_.size() > kMaxMessage) {
      throw Error(ErrorCode::kInternal, "a control message is incomplete");
    }
    bool last = record.front() == kLast;
    room |= ring_.pop();
    if (last) {
      assembled_.swap(pieces_);
      return assembled_;
    }
  }
}

MemberChannel::MemberChannel(const ShmLayout& layout, int local)
    : up_(layout.up(local)), down_(layout.down(local)), leader_wakeup_(layout.wakeup(0)) {}

std::optional<ByteView> MemberChannel::next_entry() {
  bool room = false;
  const auto entry = down_.next(room);
  if (room) leader_wakeup_.notify();
  return entry;
}

LeaderChannel::LeaderChannel(const ShmLayout& layout, const std::vector<Rank>& ranks) {
  for (int i = 0; i < static_cast<int>(ranks.size()); ++i) {
    members_.emplace_back(ranks[static_cast<size_t>(i)], layout.wakeup(i), layout.up(i),
                          layout.down(i));
  }
}

// Catches errors of a member's corrupt ring, so that the leader can still work for the other members.
template <class Work>
void LeaderChannel::guarded(Member& member, std::atomic<bool>& broken, Work&& work) {
  if (broken) return;
  try {
    work();
  } catch (const Error& error) {
    broken = true;
    broken_.emplace_back(member.rank, error);
  }
}

bool LeaderChannel::drain(const OnReport& hear, const OnBroken& lose) {
  bool any = false;
  for (Member& member : members_) {
    guarded(member, member.up_broken, [&] {
      for (;;) {
        bool room = false;
        const auto report = member.up.next(room);
        member.ring |= room;
        any |= room;
        if (!report) break;
        any = true;
        hear(member.rank, *report);
      }
    });
    guarded(member, member.down_broken, [&] {
      if (!member.down.can_flush()) return;
      member.down.flush();
      member.ring = any = true;
    });
  }
  for (const auto& [rank, error] : std::exchange(broken_, {})) {
    any = true;
    lose(rank, error);
  }
  return any;
}

void LeaderChannel::publish(ByteView entry) {
  for (Member& member : members_) {
    guarded(member, member.down_broken, [&] {
      member.down.push(entry);
      member.ring = true;
    });
  }
}

void LeaderChannel::wake_members() {
  for (Member& member : members_) {
    if (std::exchange(member.ring, false)) member.wakeup.notify();
  }
}

bool LeaderChannel::has_report() const {
  return std::any_of(members_.begin(), members_.end(), [](const Member& member) {
    return (!member.up_broken && !member.up.empty()) ||
           (!member.down_broken && member.down.can_flush());
  });
}

bool LeaderChannel::delivered() const {
  return std::ranges::all_of(
      members_, [](const Member& member) { return member.down_broken || member.down.delivered(); });
}

}  // namespace farandole
