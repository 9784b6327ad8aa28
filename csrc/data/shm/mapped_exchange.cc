// SPDX-License-Identifier: Apache-2.0
#include "data/shm/mapped_exchange.h"

#include <optional>
#include <utility>

namespace farandole {
namespace {

bool overlap(const std::byte* a, size_t a_bytes, const std::byte* b, size_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

// While peers read an input, its owner goes on to write results. In an allreduce these come range by
// range, after everybody has read that range; a reducescatter's would come over unread bytes.
bool may_show_input(const Part& part) {
  if (part.signature.traits().pattern != Pattern::kReduceToOwners) return true;
  const size_t bytes = part.signature.bytes();
  return part.output == nullptr || !overlap(part.input, bytes, part.output, bytes);
}

}  // namespace

MappedExchange::MappedExchange(const Setup& setup, HostArenas& arenas, StagedExchange staged)
    : tables_(reinterpret_cast<Table*>(setup.tables)),
      member_(setup.member),
      slots_(static_cast<size_t>(setup.slots)),
      locals_(setup.locals),
      arenas_(arenas),
      staged_(std::move(staged)) {}

size_t MappedExchange::bytes_needed(int members, int slots) {
  return static_cast<size_t>(members) * static_cast<size_t>(slots) * sizeof(Table);
}

// Nobody knows when all have read an input that every member reduces: its owner may be first to overwrite
// it. Such blocks are small.
void MappedExchange::open(uint64_t number, const Block& block) {
  arenas_.look_around(locals_);
  if (!block.shows()) return;
  const uint64_t used = arenas_.has_own() && !block.whole ? 1 : 0;
  uint64_t& told = table(number, member_).used;
  if (told != used) told = used;  // else the peers' copies of the line stay valid
}

uint64_t MappedExchange::address_of(const std::byte* memory, size_t bytes) {
  const std::optional<uint64_t> offset = arenas_.offset_of(memory, locals_);
  if (!offset) return kNowhere;
  arenas_.count(bytes);
  return *offset + 1;
}

bool MappedExchange::offer(uint64_t block, const Range& range, const Part& part) {
  if (table(block, member_).used == 0) return staged_.offer(block, range, part);
  const uint64_t input = may_show_input(part) ? address_of(part.input, range.bytes) : kNowhere;
  own(block, range).input = input;
  return input != kNowhere || staged_.offer(block, range, part);
}

void MappedExchange::expect(uint64_t block, const Range& range, const Part& part) {
  if (table(block, member_).used == 0) return;
  own(block, range).output = address_of(part.output, range.bytes);
}

const std::byte* MappedExchange::reach(uint64_t block, const Range& range, int member) {
  const uint64_t input = seen(block, range, member).input;
  return input == kNowhere ? staged_.reach(block, range, member)
                           : memory_of(member, input) + range.input;
}

void MappedExchange::deliver(uint64_t block, const Range& range, std::vector<std::byte*>& targets) {
  bool all = true;
  for (int member = 0; member < static_cast<int>(locals_.size()); ++member) {
    if (member == member_) continue;
    const uint64_t output = seen(block, range, member).output;
    all = all && output != kNowhere;
    if (output != kNowhere) targets.push_back(memory_of(member, output) + range.output);
  }
  if (!all) staged_.deliver(block, range, targets);
}

void MappedExchange::fetch(uint64_t block, const Range& range, const Part& part) {
  if (part.signature.traits().pattern == Pattern::kReduceToAll) {
    const uint64_t output = seen(block, range, member_).output;
    if (output == kNowhere) return staged_.fetch(block, range, part);
    arenas_.catch_up(part.output + range.output, output - 1 + range.output, range.bytes);
    return;
  }
  const uint64_t input = seen(block, range, range.member).input;
  if (input == kNowhere) return staged_.fetch(block, range, part);
  kernels::copy(part.output + range.output, memory_of(range.member, input) + range.input,
                range.bytes);
}

void MappedExchange::abandon(std::span<const Part> parts) {
  for (const Part& part : parts) {
    if (part.input != nullptr) arenas_.retire(part.input);
    if (part.output != nullptr) arenas_.retire(part.output);
  }
}

}  // namespace farandole
