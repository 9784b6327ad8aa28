// SPDX-License-Identifier: Apache-2.0
#include "data/shm/exchange.h"

#include <optional>

namespace farandole {
namespace {

bool overlap(const std::byte* a, size_t a_bytes, const std::byte* b, size_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

// Peers may read an input while its owner already writes results. An allreduce writes each range after all
// have read it, but an overlapping reducescatter would overwrite bytes not yet read.
bool may_show_input(const Part& part) {
  if (part.signature.traits().pattern != Pattern::kReduceToOwners) return true;
  const size_t bytes = part.signature.bytes();
  return part.output == nullptr || !overlap(part.input, bytes, part.output, bytes);
}

}  // namespace

Exchange::Exchange(const Setup& setup)
    : tables_(reinterpret_cast<Table*>(setup.tables)),
      memory_(setup.memory),
      member_(setup.member),
      slots_(static_cast<size_t>(setup.slots)),
      block_bytes_(setup.block_bytes),
      arenas_(setup.arenas),
      locals_(setup.locals) {}

size_t Exchange::table_bytes(int members, int slots) {
  return static_cast<size_t>(members) * static_cast<size_t>(slots) * sizeof(Table);
}

size_t Exchange::slot_bytes(int members, int slots, size_t block_bytes) {
  return static_cast<size_t>(members) * static_cast<size_t>(slots) * block_bytes;
}

// If every member reduces the whole block, nobody knows when all have read an input, and its owner may
// overwrite it first. So such blocks, which are small, are copied.
void Exchange::open(uint64_t number, const Block& block) {
  if (arenas_ == nullptr) return;
  arenas_->look_around(locals_);
  if (!block.shows()) return;
  const uint64_t used = arenas_->has_own() && !block.whole ? 1 : 0;
  uint64_t& told = table(number, member_).used;
  if (told != used) told = used;  // else keeps the cache line valid in the peers' caches
}

uint64_t Exchange::address_of(const std::byte* memory, size_t bytes) {
  const std::optional<uint64_t> offset = arenas_->offset_of(memory, locals_);
  if (!offset) return kNowhere;
  arenas_->count(bytes);
  return *offset + 1;
}

bool Exchange::offer(uint64_t block, const Range& range, const Part& part) {
  uint64_t input = kNowhere;
  if (table(block, member_).used != 0) {
    if (may_show_input(part)) input = address_of(part.input, range.bytes);
    own(block, range).input = input;
  }
  if (input != kNowhere) return true;
  kernels::copy(slot(block, range, member_), part.input + range.input, range.bytes);
  return false;
}

void Exchange::expect(uint64_t block, const Range& range, const Part& part) {
  if (table(block, member_).used == 0) return;
  own(block, range).output = address_of(part.output, range.bytes);
}

const std::byte* Exchange::reach(uint64_t block, const Range& range, int member) const {
  const uint64_t input = seen(block, range, member).input;
  return input == kNowhere ? slot(block, range, member) : memory_of(member, input) + range.input;
}

void Exchange::deliver(uint64_t block, const Range& range, const Part& part,
                       std::vector<std::byte*>& targets) const {
  bool all = arenas_ != nullptr;
  for (int member = 0; member < static_cast<int>(locals_.size()); ++member) {
    if (member == member_ || !gets_result(part.signature, member)) continue;
    const uint64_t output = seen(block, range, member).output;
    all = all && output != kNowhere;
    if (output != kNowhere) targets.push_back(memory_of(member, output) + range.output);
  }
  if (!all) targets.push_back(slot(block, range, member_));
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

}  // namespace farandole
