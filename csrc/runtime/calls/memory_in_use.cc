// SPDX-License-Identifier: Apache-2.0
#include "runtime/calls/memory_in_use.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <ranges>
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
  if (traits.rows == Rows::kBrought && mine.output) {  // see farandole_request
    result_rows = rows * set.members();
  } else if (traits.rows == Rows::kKept) {
    result_rows = kept_rows(rows, set.member, set.members());
  } else if (traits.rows == Rows::kPairs) {
    result_rows = mine.splits.empty() ? 0 : mine.splits[static_cast<size_t>(set.member)];
  }
  const size_t row = signature.row_bytes();
  return {static_cast<size_t>(rows) * row, static_cast<size_t>(result_rows) * row};
}

void refuse_in_use(const std::string& title, const std::optional<CallKey>& by) {
  const std::string other = by && !by->name.empty() ? "'" + by->name + "'" : "an unnamed call";
  throw Error(ErrorCode::kInvalidArgument, title + "its memory is in use by " + other +
                                               ", an earlier call of this rank that has not ended; "
                                               "wait for that call first, or pass a copy");
}

Elements::Elements(uintptr_t address, size_t size, std::span<const int64_t> shape,
                   std::span<const int64_t> strides)
    : begin_(address), size_(size) {
  for (size_t i = 0; i < shape.size(); ++i) {
    const auto count = static_cast<uintptr_t>(shape[i]);
    if (count == 0) size_ = 0;
    if (count < 2 || strides[i] == 0) continue;
    const auto step = static_cast<uintptr_t>(std::abs(strides[i]));
    if (strides[i] < 0) begin_ -= step * (count - 1);
    dimensions_.push_back({step, count, 0});
  }
  std::ranges::sort(dimensions_, std::greater<>(), &Dimension::step);
  uintptr_t extent = size_;
  for (Dimension& dimension : dimensions_ | std::views::reverse) {
    dimension.extent = extent;
    extent += dimension.step * (dimension.count - 1);
  }
  end_ = size_ == 0 ? begin_ : begin_ + extent;
}

bool Elements::meet(uintptr_t own, size_t depth, uintptr_t begin, uintptr_t end) const {
  if (depth == dimensions_.size()) return own < end && own + size_ > begin;
  const auto [step, count, extent] = dimensions_[depth];
  // The first index whose elements end after `begin`.
  uintptr_t i = own + extent > begin ? 0 : (begin - own - extent) / step + 1;
  for (; i < count && own + i * step < end; ++i) {
    if (meet(own + i * step, depth + 1, begin, end)) return true;
  }
  return false;
}

MemoryInUse::Buffers MemoryInUse::buffers_of(const Signature& signature, const Submission& mine,
                                             const ProcessSet& set) const {
  Buffers found{};
  if (mine.device != kCpuDevice || !signature.traits().moves_bytes()) return found;
  const BufferSizes sizes = sizes_of(signature, mine, set);
  // The root of an in-place broadcast only reads.
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
  auto user = [this](const Range& one, bool writes) {
    return user_of(Elements(one.begin, one.end - one.begin), writes);
  };
  const Handle found = user(written, true);
  return found != 0 ? found : user(read, false);
}

Handle MemoryInUse::user_of(const Elements& elements, bool writes) const {
  if (elements.empty()) return 0;
  auto meets = [&](const Range& one) { return elements.meet(one.begin, one.end); };
  // Written ranges do not overlap, so their ends are in ascending order as well.
  auto writer = std::ranges::lower_bound(written_, elements.end(), {}, &Range::begin);
  while (writer != written_.begin() && (--writer)->end > elements.begin()) {
    if (meets(*writer)) return writer->user;
  }
  if (!writes) return 0;
  const uintptr_t first = elements.begin() - std::min(elements.begin(), longest_read_);
  auto reader = std::ranges::lower_bound(read_, first, {}, &Range::begin);
  for (; reader != read_.end() && reader->begin < elements.end(); ++reader) {
    if (meets(*reader)) return reader->user;
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
