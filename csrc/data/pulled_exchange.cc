// SPDX-License-Identifier: Apache-2.0
#include "data/pulled_exchange.h"

#include <cerrno>
#include <cstdlib>
#include <string>
#include <utility>

#include "core/error.h"
#include "data/part_layout.h"
#include "lib/process_memory.h"

namespace farandole {
namespace {

uintptr_t address_of(const std::byte* bytes) { return reinterpret_cast<uintptr_t>(bytes); }

// The most that one range of a reduction holds: a stripe, or a share.
size_t longest_range(size_t block_bytes, size_t members) {
  return block_bytes / members + FusionPlan::kAlignment;
}

[[noreturn]] void throw_unread(const PulledExchange::Peer& peer, int error) {
  const std::string who = "rank " + std::to_string(peer.rank) + " (pid " + std::to_string(peer.pid) + ")";
  if (error == ESRCH || error == EFAULT) {
    throw Error(ErrorCode::kPeer, who + " has ended, or has freed a tensor that was being reduced");
  }
  throw_system_error("cannot read the memory of " + who, error, "set FARANDOLE_SINGLE_COPY=off");
}

}  // namespace

PulledExchange::PulledExchange(StagedExchange& staged, const HostProgressTable& progress,
                               std::byte* table, int member, std::vector<Peer> peers,
                               size_t block_bytes, size_t least_bytes)
    : staged_(staged),
      progress_(progress),
      table_(reinterpret_cast<Entry*>(table)),
      member_(member),
      peers_(std::move(peers)),
      least_bytes_(least_bytes),
      scratch_step_(longest_range(block_bytes, peers_.size())),
      scratch_(scratch_step_ * peers_.size()) {}

size_t PulledExchange::table_bytes(int members) {
  return static_cast<size_t>(members) * kMostEntries * sizeof(Entry);
}

PulledExchange::Entry& PulledExchange::entry(int member, int32_t index) const {
  return table_[static_cast<size_t>(member) * kMostEntries + static_cast<size_t>(index)];
}

PulledExchange::Entry PulledExchange::entry_of(int member, const Range& range) const {
  const int32_t index = entry_of_part_[range.part];
  return index == kStaged ? Entry() : entry(member, index);
}

void PulledExchange::begin(std::span<const Part> parts) {
  parts_ = parts;
  entry_of_part_.assign(parts.size(), kStaged);
  entries_ = 0;
  for (size_t i = 0; i < parts.size() && entries_ < kMostEntries; ++i) {
    const auto members = static_cast<int>(peers_.size());
    if (PartLayout(parts[i], members).typical_bytes() < least_bytes_) continue;
    entry_of_part_[i] = static_cast<int32_t>(entries_++);
    entry(member_, entry_of_part_[i]) = announcement(parts[i]);
  }
}

// A peer reads my input of a range after I have begun, and before it tells that it has reduced (or
// consumed) it. Until then I may write over that range's bytes by no other range of the bucket.
PulledExchange::Entry PulledExchange::announcement(const Part& part) const {
  const uintptr_t input = address_of(part.input);
  const uintptr_t output = address_of(part.output);
  if (part.signature.op == Op::kAllreduce) return {input, getenv("X_SLOT") ? 0 : output};
  if (part.signature.op == Op::kBroadcast) return {input, 0};
  const PartLayout layout(part, static_cast<int>(peers_.size()));
  const bool apart = output + layout.output_bytes(member_) <= input ||
                     input + layout.input_bytes(member_) <= output;
  return {apart || output == 0 ? input : 0, 0};
}

void PulledExchange::offer(uint64_t block, const Range& range, const std::byte* input) {
  if (entry_of(member_, range).input == 0) staged_.offer(block, range, input);
}

const std::byte* PulledExchange::reach(uint64_t block, const Range& range, int member) {
  const Entry theirs = entry_of(member, range);
  if (theirs.input == 0) return staged_.reach(block, range, member);
  std::byte* const to = scratch_.data() + static_cast<size_t>(member) * scratch_step_;
  return pull(member, theirs.input + range.input, to, range.bytes) ? to : nullptr;
}

std::byte* PulledExchange::result(uint64_t block, const Range& range, std::byte* output) {
  return entry_of(member_, range).result != 0 ? output : staged_.result(block, range, output);
}

bool PulledExchange::fetch(uint64_t block, const Range& range, std::byte* output) {
  const Entry theirs = entry_of(range.member, range);
  const bool reduced = parts_[range.part].signature.op == Op::kAllreduce;
  const uintptr_t base = reduced ? theirs.result : theirs.input;
  if (base == 0) return staged_.fetch(block, range, output);
  // The result of an allreduce lies where the input did.
  return pull(range.member, base + range.input, output, range.bytes);
}

// The flag is read after the bytes: they count only if that member had not aborted by then.
bool PulledExchange::pull(int member, uintptr_t from, std::byte* to, size_t bytes) const {
  const Peer& peer = peers_[static_cast<size_t>(member)];
  const int error = read_process_memory(peer.pid, from, to, bytes);
  if (progress_.aborted(member)) return false;
  if (error != 0) throw_unread(peer, error);
  return true;
}

}  // namespace farandole
