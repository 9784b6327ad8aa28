// SPDX-License-Identifier: Apache-2.0
#include "data/shm/shm_backend.h"

#include <algorithm>
#include <optional>
#include <string>

#include "base/error.h"
#include "data/backend/backend.h"
#include "kernels/kernels.h"
#include "lib/os/memory.h"

namespace farandole {
namespace {

// Small enough that a reduced chunk is still in the L1 cache when it is copied to the other targets.
constexpr size_t kChunkBytes = 32 * 1024;

// The counters and marks start on a new page, and so do the address tables and the slots.
size_t marks_begin(int members) { return HostProgressTable::bytes_needed(members); }
size_t tables_begin(int members, int slots) {
  return whole_pages(marks_begin(members) + Exchange::mark_bytes(members, slots));
}
size_t slots_begin(int members, int slots) {
  return tables_begin(members, slots) + whole_pages(Exchange::table_bytes(members, slots));
}

const ShmSetup& checked(const ShmSetup& setup) {
  const size_t needed = ShmBackend::sizes(setup.members, setup.block_bytes, setup.slots).bytes;
  if (setup.bytes >= needed) return setup;
  throw Error(ErrorCode::kInternal, "the staging memory has " + std::to_string(setup.bytes) +
                                        " bytes instead of " + std::to_string(needed));
}

// True if peers may read the input in place. An allreduce overwrites a range only after all members have read it. A
// reducescatter whose output overlaps its input would overwrite bytes that peers have not read yet.
bool may_show_input(const Part& part) {
  if (part.signature.traits().pattern != Pattern::kReduceToOwners) return true;
  const size_t bytes = part.signature.bytes();
  return part.output == nullptr || !overlap(part.input, bytes, part.output, bytes);
}

}  // namespace

// ---- Exchange

Exchange::Exchange(const ShmSetup& setup)
    : memory_(setup.memory),
      marks_(reinterpret_cast<Mark*>(memory_ + marks_begin(setup.members))),
      tables_(reinterpret_cast<Table*>(memory_ + tables_begin(setup.members, setup.slots))),
      slots_memory_(memory_ + slots_begin(setup.members, setup.slots)),
      fd_(setup.fd),
      member_(setup.member),
      slots_(static_cast<size_t>(setup.slots)),
      block_bytes_(setup.block_bytes),
      arenas_(setup.members == 1 ? nullptr : setup.arenas),
      locals_(setup.locals) {
  const size_t first = index(0, member_);
  for (size_t i = 0; i < slots_; ++i)
    claims_.push_back({slots_memory_ + (first + i) * block_bytes_});
  claims_.push_back({reinterpret_cast<std::byte*>(tables_ + first)});
}

size_t Exchange::mark_bytes(int members, int slots) {
  return static_cast<size_t>(members) * static_cast<size_t>(slots) * sizeof(Mark);
}

size_t Exchange::table_bytes(int members, int slots) {
  return static_cast<size_t>(members) * static_cast<size_t>(slots) * sizeof(Table);
}

size_t Exchange::slot_bytes(int members, int slots, size_t block_bytes) {
  return static_cast<size_t>(members) * static_cast<size_t>(slots) * block_bytes;
}

// A block that every member reduces as a whole has no table, so its inputs are copied. Otherwise a member could
// overwrite its own input before all members have read it.
void Exchange::open(uint64_t number, const Block& block) {
  if (arenas_ == nullptr) return;
  arenas_->look_around(locals_);
  if (!block.shows()) return;
  const uint64_t has_table = arenas_->has_own() && !block.whole ? 1 : 0;
  if (has_table) claim(claims_.back(), slots_ * sizeof(Table));
  uint64_t& told = used(number, member_);
  if (told != has_table)
    told = has_table;  // not written if unchanged, so that the mark stays in the peers' caches
}

void Exchange::claim(Claim& claim, size_t bytes) {
  if (fd_ < 0 || bytes <= claim.bytes) return;
  const auto offset = static_cast<uint64_t>(claim.begin - memory_) + claim.bytes;
  allocate_pages(fd_, "messages", offset, bytes - claim.bytes);
  held_ += bytes - claim.bytes;
  claim.bytes = bytes;
}

void Exchange::give_back() {
  for (Claim& claim : claims_) {
    free_pages(fd_, static_cast<uint64_t>(claim.begin - memory_), claim.bytes);
    claim.bytes = 0;
  }
  held_ = 0;
}

std::byte* Exchange::own_slot(uint64_t block, const Range& range) {
  Claim& slot = claims_[block % slots_];
  claim(slot, std::min(whole_pages(range.slot + range.bytes), block_bytes_));
  return slot.begin + range.slot;
}

uint64_t Exchange::address_of(const std::byte* memory, size_t bytes) {
  const std::optional<uint64_t> offset = arenas_->offset_of(memory, locals_);
  if (!offset) return kNowhere;
  arenas_->count(bytes);
  return *offset + 1;
}

bool Exchange::offer(uint64_t block, const Range& range, const Part& part) {
  uint64_t input = kNowhere;
  if (used(block, member_) != 0) {
    if (may_show_input(part)) input = address_of(part.input, range.bytes);
    own(block, range).input = input;
  }
  if (input != kNowhere) return true;
  kernels::copy(own_slot(block, range), part.input + range.input, range.bytes);
  return false;
}

void Exchange::expect(uint64_t block, const Range& range, const Part& part) {
  if (used(block, member_) == 0) return;
  own(block, range).output = address_of(part.output, range.bytes);
}

const std::byte* Exchange::reach(uint64_t block, const Range& range, int member) const {
  const uint64_t input = seen(block, range, member).input;
  return input == kNowhere ? slot(block, range, member) : memory_of(member, input) + range.input;
}

void Exchange::deliver(uint64_t block, const Range& range, const Part& part,
                       std::vector<std::byte*>& targets) {
  bool all = arenas_ != nullptr;
  for (int member = 0; member < static_cast<int>(locals_.size()); ++member) {
    if (member == member_ || !gets_result(part.signature, member)) continue;
    const uint64_t output = seen(block, range, member).output;
    all = all && output != kNowhere;
    if (output != kNowhere) targets.push_back(memory_of(member, output) + range.output);
  }
  if (!all) targets.push_back(own_slot(block, range));
}

void Exchange::fetch(uint64_t block, const Range& range, const Part& part) const {
  std::byte* const output = part.output + range.output;
  if (part.signature.traits().pattern == Pattern::kReduceToAll) {
    const uint64_t there = seen(block, range, member_).output;
    if (there != kNowhere) return arenas_->catch_up(output, there - 1 + range.output, range.bytes);
    return kernels::copy(output, slot(block, range, range.member), range.bytes);
  }
  kernels::copy(output, reach(block, range, range.member), range.bytes);
}

void Exchange::abandon(std::span<const Part> parts) {
  if (arenas_ == nullptr) return;
  for (const Part& part : parts) {
    if (part.input != nullptr) arenas_->retire(part.input);
    if (part.output != nullptr) arenas_->retire(part.output);
  }
}

// ---- ShmBackend

SegmentSize ShmBackend::sizes(int members, size_t block_bytes, int slots) {
  const size_t at_once = tables_begin(members, slots);
  if (members == 1) return at_once;  // no peer needs staged bytes
  return {slots_begin(members, slots) + Exchange::slot_bytes(members, slots, block_bytes), at_once};
}

ShmBackend::ShmBackend(const ShmSetup& setup)
    : member_(checked(setup).member),
      members_(setup.members),
      slots_(static_cast<uint64_t>(setup.slots)),
      wakeups_(setup.wakeups),
      progress_(setup.memory, setup.members),
      exchange_(setup),
      plan_(setup.member, setup.members, setup.block_bytes, setup.direct_bytes),
      watch_(setup.watch),
      blocks_(slots_ + 1) {}

void ShmBackend::begin(std::span<const Part> parts) {
  if (aborted_ || has_next_ || !finished()) {
    throw Error(ErrorCode::kInternal,
                "shared-memory backend: begin() was called during a bucket or after abort()");
  }
  plan_.start(parts);
  parts_ = parts;
  plan_next();
}

Progress ShmBackend::step() {
  if (can_consume()) {
    watch_.time(Phase::kConsume, [this] { consume(); });
  } else if (can_reduce()) {
    watch_.time(Phase::kReduce, [this] { reduce(); });
  } else if (can_stage()) {
    watch_.time(Phase::kStage, [this] { stage(); });
  } else {
    return finished() ? Progress::kFinished : Progress::kWaiting;
  }
  return finished() ? Progress::kFinished : Progress::kMoved;
}

bool ShmBackend::ready() const {
  return can_consume() || can_reduce() || can_stage() || finished();
}

void ShmBackend::abort() {
  if (!finished()) exchange_.abandon(parts_);
  aborted_ = true;
  parts_ = {};
}

void ShmBackend::rest() {
  if (held() > 0 && progress_.all_reached(&HostProgress::consumed, at_.staged)) {
    exchange_.give_back();
  }
}

bool ShmBackend::can_stage() const {
  if (!has_next_ || at_.staged >= at_.consumed + slots_) return false;
  // A slot that only the reduce phase uses need not be free yet. That phase starts when all members have staged this
  // block, and by then they have consumed the slot's older block.
  if (!block(at_.staged).shows() || at_.staged < slots_) return true;
  return progress_.all_reached(&HostProgress::consumed, at_.staged + 1 - slots_);
}

bool ShmBackend::can_reduce() const {
  if (at_.reduced == at_.staged) return false;
  return !block(at_.reduced).combines ||
         progress_.all_reached(&HostProgress::staged, at_.reduced + 1);
}

bool ShmBackend::can_consume() const {
  if (at_.consumed == at_.reduced) return false;
  const std::vector<int32_t>& sources = block(at_.consumed).sources;
  return std::all_of(sources.begin(), sources.end(), [&](int32_t source) {
    return progress_.load(source, &HostProgress::reduced) > at_.consumed;
  });
}

bool ShmBackend::finished() const {
  if (has_next_ || at_.consumed < at_.staged) return false;
  return progress_.all_reached(&HostProgress::consumed, at_.shown);
}

void ShmBackend::plan_next() { has_next_ = plan_.next(block(at_.staged)); }

void ShmBackend::stage() {
  const Block& current = block(at_.staged);
  exchange_.open(at_.staged, current);
  for (const Range& range : current.sends) {
    const bool shown = exchange_.offer(at_.staged, range, parts_[range.part]);
    // If the block has owners, this is not needed: once this member has their stripes, they have read its inputs.
    if (shown && current.owners == 0) at_.shown = at_.staged + 1;
  }
  if (current.owners > 0) {
    for (const Range& range : current.receives) {
      exchange_.expect(at_.staged, range, parts_[range.part]);
    }
  }
  for (const Range& range : current.keeps) keep(range);
  progress_.store(member_, &HostProgress::staged, ++at_.staged);
  // Only the last member to stage wakes the others.
  if (current.combines && progress_.all_reached(&HostProgress::staged, at_.staged)) ring_peers();
  plan_next();
}

void ShmBackend::keep(const Range& range) {
  const Part& part = parts_[range.part];
  if (part.output == nullptr || part.output + range.output == part.input + range.input) return;
  kernels::copy(part.output + range.output, part.input + range.input, range.bytes);
}

void ShmBackend::reduce() {
  const Block& current = block(at_.reduced);
  for (const Range& range : current.reduces) reduce_range(current, range);
  progress_.store(member_, &HostProgress::reduced, ++at_.reduced);
  const bool last_owner =  // members receive when all stripes are ready
      member_ < current.owners &&
      progress_.all_reached(&HostProgress::reduced, at_.reduced, current.owners);
  const bool sent = !current.combines && !current.sends.empty();
  if (last_owner || sent) ring_peers();
}

void ShmBackend::reduce_range(const Block& block, const Range& range) {
  const Part& part = parts_[range.part];
  std::byte* const output = part.output == nullptr ? nullptr : part.output + range.output;
  const bool shared = block.owners > 0 && part.signature.target() != member_;
  if (!shared && output == nullptr) return;
  scratch_.inputs.clear();
  for (int member = 0; member < members_; ++member) {
    if (!part.has(member)) continue;
    scratch_.inputs.push_back(member == member_ ? part.input + range.input
                                                : exchange_.reach(at_.reduced, range, member));
  }
  scratch_.targets.clear();
  // A result for peers is first written to this member's memory and then copied to the slot. The slot's cache lines are
  // in the peers' caches, and a copy claims cache lines faster than the kernels' stores do.
  if (output != nullptr) scratch_.targets.push_back(output);
  if (shared) exchange_.deliver(at_.reduced, range, part, scratch_.targets);
  combine(part, range.bytes, shared ? kChunkBytes : range.bytes);
}

// Reduces scratch_.inputs into all of scratch_.targets, `step` bytes at a time.
void ShmBackend::combine(const Part& part, size_t bytes, size_t step) {
  const Signature& signature = part.signature;
  for (size_t at = 0; at < bytes; at += step) {
    const size_t length = std::min(step, bytes - at);
    scratch_.chunk.clear();
    for (const std::byte* input : scratch_.inputs) scratch_.chunk.push_back(input + at);
    std::byte* const first = scratch_.targets.front() + at;
    kernels::reduce(signature.dtype, signature.reduce_op, first, scratch_.chunk.data(),
                    static_cast<int>(scratch_.chunk.size()), length / size_of(signature.dtype),
                    factors_of(part));
    for (size_t i = 1; i < scratch_.targets.size(); ++i)
      kernels::copy(scratch_.targets[i] + at, first, length);
  }
}

void ShmBackend::consume() {
  for (const Range& range : block(at_.consumed).receives) {
    const Part& part = parts_[range.part];
    if (part.output != nullptr) exchange_.fetch(at_.consumed, range, part);
  }
  progress_.store(member_, &HostProgress::consumed, ++at_.consumed);
  // Only the last member to consume frees the slots and wakes the others.
  if (progress_.all_reached(&HostProgress::consumed, at_.consumed)) ring_peers();
}

void ShmBackend::ring_peers() {
  for (int member = 0; member < members_; ++member) {
    if (member != member_) wakeups_[static_cast<size_t>(member)].notify();
  }
}

}  // namespace farandole
