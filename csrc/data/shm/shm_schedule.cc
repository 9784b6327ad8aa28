// SPDX-License-Identifier: Apache-2.0
#include "data/shm/shm_schedule.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "data/backend/backend.h"

namespace farandole {
void Block::clear() {
  sends.clear();
  keeps.clear();
  reduces.clear();
  receives.clear();
  sources.clear();
  combines = false;
  whole = false;
  owners = 0;
}

ShmSchedule::ShmSchedule(int member, int members, size_t block_bytes, size_t direct_bytes)
    : member_(member),
      members_(members),
      block_bytes_(block_bytes),
      direct_bytes_(direct_bytes),
      run_(members),
      lanes_(static_cast<size_t>(members)) {}

void ShmSchedule::start(std::span<const Part> parts) {
  for (const Part& part : parts) PartLayout(part, members_).check(member_);
  run_.start(parts);
  lanes_.assign(lanes_.size(), run_.lane());
}

bool ShmSchedule::next(Block& block) {
  for (;;) {
    block.clear();
    if (fill(block)) return true;
    if (!run_.open([](const Part& part) { return kind_of(part.signature); })) return false;
    kind_ = kind_of(run_.front().signature);
    lanes_.assign(lanes_.size(), run_.lane());
  }
}

ShmSchedule::Kind ShmSchedule::kind_of(const Signature& signature) {
  switch (signature.traits().pattern) {
    case Pattern::kReduceToAll: return Kind::kAllreduce;
    case Pattern::kReduceToOwners: return Kind::kReducescatter;
    case Pattern::kOneToAll:
    case Pattern::kEachToAll:
    case Pattern::kEachToEach: return Kind::kCopy;
    case Pattern::kMeet:
    case Pattern::kNone: break;
  }
  throw Error(ErrorCode::kInternal, std::string(name_of(signature.op)) + " moves no bytes");
}

bool ShmSchedule::fill(Block& block) {
  switch (kind_) {
    case Kind::kAllreduce: return fill_allreduce(block);
    case Kind::kReducescatter: return fill_reducescatter(block);
    case Kind::kCopy: return fill_copy(block);
  }
  return false;
}

bool ShmSchedule::fill_allreduce(Block& block) {
  segments_.clear();
  const size_t bytes = run_.fill_window(
      lanes_[0], block_bytes_, as_it_is,
      [&](const PartLayout&, const PartLane& lane) { return run_[lane.part].signature.bytes(); },
      [&](const PartLane& lane, size_t slot, size_t length) {
        segments_.push_back(
            {static_cast<uint32_t>(lane.part), member_, slot, lane.offset, lane.offset, length});
      });
  if (bytes == 0) return false;
  block.combines = true;
  const auto members = static_cast<size_t>(members_);
  if (members == 1 || bytes * members <= direct_bytes_) {
    block.whole = true;
    for (const Range& segment : segments_) add_direct(block, segment);
    return true;
  }
  const size_t stripe_bytes = round_up((bytes + members - 1) / members, kAlignment);
  block.owners = static_cast<int>((bytes + stripe_bytes - 1) / stripe_bytes);
  for (int owner = 0; owner < block.owners; ++owner) {
    if (owner != member_) block.sources.push_back(owner);
  }
  for (const Range& segment : segments_) add_stripes(block, segment, stripe_bytes);
  return true;
}

void ShmSchedule::add_direct(Block& block, const Range& segment) const {
  if (members_ > 1 && run_[segment.part].has(member_)) block.sends.push_back(segment);
  block.reduces.push_back(segment);
}

void ShmSchedule::add_stripes(Block& block, const Range& segment, size_t stripe_bytes) const {
  const bool present = run_[segment.part].has(member_);
  Range rest = segment;
  while (rest.bytes > 0) {
    const size_t stripe = rest.slot / stripe_bytes;
    Range range = rest;
    range.bytes = std::min(rest.bytes, (stripe + 1) * stripe_bytes - rest.slot);
    if (static_cast<int>(stripe) == member_) {
      block.reduces.push_back(range);
    } else {
      if (present) block.sends.push_back(range);
      range.member = static_cast<int32_t>(stripe);
      block.receives.push_back(range);
    }
    rest.slot += range.bytes;
    rest.input += range.bytes;
    rest.output += range.bytes;
    rest.bytes -= range.bytes;
  }
}

// Cuts all shares of a part at the same offsets, as if each share were as long as the first one, which is the longest.
// Therefore the output may start at the input's address. Every byte that the output overwrites has already been staged.
// The output does not overlap the member's own share, because no earlier share is shorter.
bool ShmSchedule::fill_reducescatter(Block& block) {
  const size_t window = block_bytes_ / static_cast<size_t>(members_) / kAlignment * kAlignment;
  const size_t bytes = run_.fill_window(
      lanes_[0], window, as_it_is,
      [&](const PartLayout& layout, const PartLane&) { return layout.share_bytes(0); },
      [&](const PartLane& lane, size_t slot, size_t length) {
        for (int owner = 0; owner < members_; ++owner) {
          add_share(block, owner, lane, static_cast<size_t>(owner) * window + slot, length);
        }
      });
  block.combines = true;
  return bytes > 0;
}

void ShmSchedule::add_share(Block& block, int owner, const PartLane& lane, size_t slot,
                            size_t bytes) const {
  const Part& part = run_[lane.part];
  const PartLayout layout(part, members_);
  const size_t share = layout.share_bytes(owner);
  if (lane.offset >= share) return;
  const Range range = {
      static_cast<uint32_t>(lane.part),        member_,     slot,
      layout.share_start(owner) + lane.offset, lane.offset, std::min(bytes, share - lane.offset)};
  if (owner == member_) {
    block.reduces.push_back(range);
  } else if (part.has(member_)) {
    block.sends.push_back(range);
  }
}

bool ShmSchedule::fill_copy(Block& block) {
  size_t total = 0;
  for (int sender = 0; sender < members_; ++sender) {
    const size_t received = block.receives.size();
    total += run_.fill_window(
        lanes_[static_cast<size_t>(sender)], block_bytes_, as_it_is,
        [&](const PartLayout& layout, const PartLane& lane) {
          return layout.piece_bytes(sender, lane.piece);
        },
        [&](const PartLane& lane, size_t slot, size_t bytes) {
          add_copy(block, sender, lane, slot, bytes);
        });
    if (block.receives.size() > received) block.sources.push_back(sender);
  }
  return total > 0;
}

void ShmSchedule::add_copy(Block& block, int sender, const PartLane& lane, size_t slot,
                           size_t bytes) const {
  const PartLayout layout(run_[lane.part], members_);
  const int receiver = layout.receiver(sender, lane.piece);
  const bool to_me = receiver == PartLayout::kEverybody || receiver == member_;
  if (sender != member_ && !to_me) return;
  const int where = receiver == PartLayout::kEverybody ? member_ : receiver;
  const Range range = {static_cast<uint32_t>(lane.part),
                       sender,
                       slot,
                       layout.piece_start(sender, where) + lane.offset,
                       layout.landing_start(sender, where) + lane.offset,
                       bytes};
  if (sender != member_) {
    block.receives.push_back(range);
    return;
  }
  if (receiver != member_ && members_ > 1) block.sends.push_back(range);
  if (to_me) block.keeps.push_back(range);
}

}  // namespace farandole
