// SPDX-License-Identifier: Apache-2.0
#include "control/channel/shm_channel.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/log.h"

namespace farandole {
namespace {

constexpr std::byte kLast{0};
constexpr std::byte kMore{1};
constexpr size_t kMaxMessage = size_t{256} << 20;  // beyond it, the peer is mad

constexpr size_t ring_area() { return (RingMemory::bytes(ShmLayout::kRingBytes) + 63) / 64 * 64; }

}  // namespace

size_t ShmLayout::bytes_needed(int ranks) {
  return static_cast<size_t>(ranks) * (sizeof(EventCount) + 2 * ring_area());
}

std::byte* ShmLayout::area(int local) const {
  return memory_ + static_cast<size_t>(local) * (sizeof(EventCount) + 2 * ring_area());
}

EventCount* ShmLayout::bell(int local) const { return reinterpret_cast<EventCount*>(area(local)); }

std::vector<EventCount*> ShmLayout::bells() const {
  std::vector<EventCount*> bells;
  for (int i = 0; i < ranks_; ++i) bells.push_back(bell(i));
  return bells;
}

std::byte* ShmLayout::up(int local) const { return area(local) + sizeof(EventCount); }
std::byte* ShmLayout::down(int local) const { return up(local) + ring_area(); }

void MessageWriter::push(ByteView message) {
  size_t piece = queue_.max_record() - 1;
  while (message.size() > piece) {
    queue_.push(ByteView(&kMore, 1), message.first(piece));
    message = message.subspan(piece);
  }
  queue_.push(ByteView(&kLast, 1), message);
  const bool waiting = queue_.pending() > 0;
  if (waiting_ != waiting)
    waiting_ = waiting;  // a store that others must see costs more than a look
}

void MessageWriter::flush() { waiting_ = !queue_.flush(); }

ByteView MessageReader::next(bool& room) {
  room = false;
  if (held_) room |= ring_.pop();
  held_ = false;
  assembled_.clear();
  for (;;) {
    ByteView record = ring_.front();
    if (record.empty()) return {};  // pieces that came wait for the others
    ByteView body = record.subspan(1);
    if (record.front() == kLast && pieces_.empty()) {
      held_ = true;
      return body;
    }
    pieces_.insert(pieces_.end(), body.begin(), body.end());
    if (pieces_.size() > kMaxMessage) {
      throw Error(ErrorCode::kInternal, "a control message does not end");
    }
    bool last = record.front() == kLast;
    room |= ring_.pop();
    if (last) {
      assembled_.swap(pieces_);
      return assembled_;
    }
  }
}

ShmMember::ShmMember(const ShmLayout& layout, int local)
    : up_(layout.up(local)), down_(layout.down(local)), leader_bell_(layout.bell(0)) {}

ByteView ShmMember::next_entry() {
  bool room = false;
  ByteView entry = down_.next(room);
  if (room) leader_bell_->notify();
  return entry;
}

ShmLeader::ShmLeader(const ShmLayout& layout, std::vector<Rank> ranks) {
  for (int i = 0; i < static_cast<int>(ranks.size()); ++i) {
    members_.emplace_back(ranks[static_cast<size_t>(i)], layout.bell(i), layout.up(i),
                          layout.down(i));
  }
}

// One member that overwrites its rings must not keep the leader from all others.
template <class Work>
void ShmLeader::guarded(Member& member, std::atomic<bool>& broken, Work&& work) {
  if (broken) return;
  try {
    work();
  } catch (const Error& error) {
    log(LogLevel::kError, "rank " + std::to_string(member.rank) + ": " + error.what());
    broken = true;
    broken_.push_back(member.rank);
  }
}

bool ShmLeader::drain(const Visitor& visit) {
  bool any = false;
  for (Member& member : members_) {
    guarded(member, member.up_broken, [&] {
      for (;;) {
        bool room = false;
        ByteView report = member.up.next(room);
        member.ring |= room;
        any |= room;
        if (report.empty()) break;
        any = true;
        visit(member.rank, report);
      }
    });
    guarded(member, member.down_broken, [&] {
      if (!member.down.can_flush()) return;
      member.down.flush();
      member.ring = any = true;
    });
  }
  for (Rank rank : std::exchange(broken_, {})) {
    any = true;
    visit(rank, {});  // no report: it can't be understood any more
  }
  return any;
}

void ShmLeader::publish(ByteView entry) {
  for (Member& member : members_) {
    guarded(member, member.down_broken, [&] {
      member.down.push(entry);
      member.ring = true;
    });
  }
}

void ShmLeader::ring_members() {
  for (Member& member : members_) {
    if (std::exchange(member.ring, false)) member.bell->notify();
  }
}

bool ShmLeader::has_report() const {
  return std::any_of(members_.begin(), members_.end(), [](const Member& member) {
    return (!member.up_broken && !member.up.empty()) ||
           (!member.down_broken && member.down.can_flush());
  });
}

}  // namespace farandole
