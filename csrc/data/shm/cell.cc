// SPDX-License-Identifier: Apache-2.0
#include "data/shm/cell.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/types.h"
#include "kernels/kernels.h"

namespace farandole {
namespace {

// A member that has waited this long dissolves the round. A call through the coordinator takes much less time.
constexpr std::chrono::milliseconds kCellPatience{2};
// Limits on the size of one input and of all inputs together, because every member reads all inputs. Above these
// limits, it is faster to divide the work, although members then wait more often (measured with 2 to 4 ranks on 2 cores
// with 1 MiB of L2 each).
constexpr size_t kMostBytes = 1024 * 1024;
constexpr size_t kMostBytesOfAll = 2 * 1024 * 1024;

}  // namespace

struct alignas(64) Cell::Word {
  std::atomic<uint32_t> word;

  uint32_t load() const { return word.load(); }
  bool replace(uint32_t& expected, uint32_t desired) {
    return word.compare_exchange_strong(expected, desired);
  }
  void wake() { futex_wake(word, cell_protocol::kMostMembers, kFutexAnyBit); }
  bool sleep(uint32_t expected, Deadline deadline) {
    const FutexResult result = futex_wait(word, expected, kFutexAnyBit, deadline);
    return result == FutexResult::kWoken || result == FutexResult::kChanged;
  }
};

size_t Cell::most_bytes(int members) {
  const size_t fair = kMostBytesOfAll / static_cast<size_t>(members);
  return std::min(kMostBytes, fair / kAlignment * kAlignment);
}

size_t Cell::bytes(int members) {
  if (members < 2 || std::cmp_greater(members, cell_protocol::kMostMembers)) return 0;
  const size_t lines = sizeof(Word) + static_cast<size_t>(members) * sizeof(Line);
  return round_up(lines, kAlignment) + 2 * static_cast<size_t>(members) * most_bytes(members);
}

Cell::Cell(Setup setup)
    : setup_(std::move(setup)),
      memory_(setup_.segment->data() + setup_.offset),
      most_bytes_(most_bytes(setup_.members)) {}

Cell::Word& Cell::word() const { return *reinterpret_cast<Word*>(memory_); }

Cell::Line& Cell::line(int member) const {
  return reinterpret_cast<Line*>(memory_ + sizeof(Word))[member];
}

std::byte* Cell::place(int member, uint32_t parity) const {
  const auto members = static_cast<size_t>(setup_.members);
  const size_t lines = round_up(sizeof(Word) + members * sizeof(Line), kAlignment);
  return memory_ + lines + (parity * members + static_cast<size_t>(member)) * most_bytes_;
}

bool Cell::all_make(const Call& call) const {
  for (int member = 0; member < setup_.members; ++member) {
    const Line& its = line(member);
    const Call made{its.definition.load(), its.sequence.load(), its.rows.load()};
    if (made != call) return false;
  }
  return true;
}

// True if a peer has calls under way outside the cell. Ignores a peer that has seen fewer calls end than this member,
// because that peer's count may include calls that have ended.
bool Cell::anybody_elsewhere() const {
  const uint64_t own = line(setup_.member).elsewhere.load() >> kCountBits;
  for (int member = 0; member < setup_.members; ++member) {
    const uint64_t its = line(member).elsewhere.load();
    const bool busy = its % (uint64_t{1} << kCountBits) > 0;
    if (member != setup_.member && busy && its >> kCountBits >= own) return true;
  }
  return false;
}

cell_protocol::End Cell::come(const Call& call, std::span<const std::byte> input) {
  using cell_protocol::End;
  // No round completes without this member, so the parity cannot change before this member arrives.
  parity_ = cell_protocol::parity(word().load());
  Line& own = line(setup_.member);
  own.definition.store(call.definition, std::memory_order_relaxed);
  own.sequence.store(call.sequence, std::memory_order_relaxed);
  own.rows.store(call.rows, std::memory_order_relaxed);
  kernels::copy(place(setup_.member, parity_), input.data(), input.size());
  uint32_t round = 0;
  End end = cell_protocol::arrive(word(), static_cast<uint32_t>(setup_.members), round,
                                  [&] { return all_make(call); });
  if (end != End::kUnderWay) return end;
  if (anybody_elsewhere()) return cell_protocol::give_up(word(), round);
  const Deadline deadline = Deadline::in(kCellPatience);
  setup_.spin(false, [&] {
    end = cell_protocol::end_of(round, word().load());
    return end != End::kUnderWay;
  });
  if (end != End::kUnderWay) return end;
  return cell_protocol::sleep_until_end(word(), round, deadline);
}

void Cell::tell(uint64_t ended, uint32_t under_way) {
  line(setup_.member).elsewhere.store(ended << kCountBits | under_way);
  if (under_way > 0) disturb();
}

void Cell::disturb() { cell_protocol::disturb(word()); }

}  // namespace farandole
