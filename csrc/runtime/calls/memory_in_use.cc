// SPDX-License-Identifier: Apache-2.0
#include "runtime/calls/memory_in_use.h"

#include <algorithm>
#include <string>

#include "runtime/calls/request_checks.h"

namespace farandole {
namespace {

uintptr_t address_of(const std::byte* buffer) { return reinterpret_cast<uintptr_t>(buffer); }

}  // namespace

BufferSizes sizes_of(const Signature& signature, const Submission& mine, const ProcessSet& set) {
  const CollectiveTraits& traits = signature.traits();
  const int64_t rows = mine.shape.empty() ? 1 : mine.shape[0];
  int64_t result_rows = rows;
  if (traits.rows == Rows::kKept) {
    result_rows = kept_rows(rows, set.member, set.members());
  } else if (traits.rows == Rows::kPairs) {
    result_rows = mine.splits.empty() ? 0 : mine.splits[static_cast<size_t>(set.member)];
  }
  const size_t row = signature.row_bytes();
  return {static_cast<size_t>(rows) * row, static_cast<size_t>(result_rows) * row};
}

void refuse_in_use(const Request& request, const std::optional<CallKey>& by) {
  const std::string other = by && !by->name.empty() ? "'" + by->name + "'" : "an unnamed call";
  throw Error(ErrorCode::kInvalidArgument, title_of(request) + ": its memory is in use by " +
                                               other +
                                               ", an earlier call of this rank that has not ended; "
                                               "wait for that one first, or give a copy");
}

MemoryInUse::Buffers MemoryInUse::buffers_of(const Signature& signature, const Submission& mine,
                                             const ProcessSet& set) const {
  Buffers found{};
  if (mine.device != kCpuDevice || !signature.traits().moves_bytes()) return found;
  const BufferSizes sizes = sizes_of(signature, mine, set);
  // The root of a broadcast in place gets what it sends.
  const bool only_reads =
      mine.output == mine.input && signature.op == Op::kBroadcast && brings_input(signature, own_);
  if (mine.output && gets_result(signature, own_) && !only_reads) {
    const uintptr_t begin = address_of(mine.output);
    found.written = {begin, begin + sizes.output, mine.handle};
  }
  if (mine.input && brings_input(signature, own_)) {
    const uintptr_t begin = address_of(mine.input);
    const Range read{begin, begin + sizes.input, mine.handle};
    const bool apart = read.end <= found.written.begin || found.written.end <= read.begin;
    if (apart) found.read = read;
  }
  return found;
}

Handle MemoryInUse::user_of(const Signature& signature, const Submission& mine,
                            const ProcessSet& set) const {
  const auto [read, written] = buffers_of(signature, mine, set);
  // The ranges do not overlap, so only the last one that begins before the end can be in the way.
  auto writer = [this](const Range& one) -> Handle {
    auto after = std::ranges::lower_bound(written_, one.end, {}, &Range::begin);
    if (one.begin == one.end || after == written_.begin()) return 0;
    const Range& last = *std::prev(after);
    return last.end > one.begin ? last.user : 0;
  };
  if (const Handle user = writer(written)) return user;
  if (const Handle user = writer(read)) return user;
  if (written.begin == written.end) return 0;
  const uintptr_t first = written.begin - std::min(written.begin, longest_read_);
  auto reader = std::ranges::lower_bound(read_, first, {}, &Range::begin);
  for (; reader != read_.end() && reader->begin < written.end; ++reader) {
    if (reader->end > written.begin) return reader->user;
  }
  return 0;
}

void MemoryInUse::add(const Signature& signature, const Submission& mine, const ProcessSet& set) {
  const auto [read, written] = buffers_of(signature, mine, set);
  if (written.begin != written.end) insert(written_, written);
  if (read.begin == read.end) return;
  insert(read_, read);
  longest_read_ = std::max(longest_read_, read.end - read.begin);
}

void MemoryInUse::insert(Ranges& ranges, const Range& one) {
  ranges.insert(std::ranges::upper_bound(ranges, one.begin, {}, &Range::begin), one);
}

void MemoryInUse::remove(const Submission& mine) {
  if (mine.device != kCpuDevice) return;
  if (mine.output) erase(written_, mine.output, mine.handle);
  if (mine.input) erase(read_, mine.input, mine.handle);
}

void MemoryInUse::erase(Ranges& ranges, const std::byte* buffer, Handle user) {
  const uintptr_t begin = address_of(buffer);
  auto found = std::ranges::lower_bound(ranges, begin, {}, &Range::begin);
  while (found != ranges.end() && found->begin == begin && found->user != user) ++found;
  if (found != ranges.end() && found->begin == begin) ranges.erase(found);
}

void MemoryInUse::clear() {
  written_.clear();
  read_.clear();
  longest_read_ = 0;
}

}  // namespace farandole
