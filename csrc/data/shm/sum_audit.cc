// SPDX-License-Identifier: Apache-2.0
#include "data/shm/sum_audit.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "kernels/kernels.h"

namespace farandole {
namespace {

// "0x3f800000", and for floats the number before it.
std::string text_of_number(DType dtype, const std::byte* number) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string bits = "0x";
  for (size_t i = size_of(dtype); i-- > 0;) {
    const auto byte = std::to_integer<unsigned>(number[i]);
    bits += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  if (!traits_of(dtype).is_float()) return bits;
  double value = 0;
  float single = 0;
  const void* const input = number;
  if (dtype == DType::kFloat64) {
    std::memcpy(&value, number, sizeof value);
  } else {
    kernels::reduce_to_partial(dtype, ReduceOp::kSum, &single, &input, 1, 1, {});
    value = static_cast<double>(single);
  }
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return std::string(text) + " (" + bits + ")";
}

}  // namespace

bool Audit::takes(std::span<const Part> parts) {
  const bool reduces = std::ranges::any_of(
      parts, [](const Part& part) { return part.signature.traits().reduces(); });
  if (!ever() || !reduces) return false;
  return ++buckets_ % static_cast<uint64_t>(setup_.every) == 0;
}

// SplitMix64 (Steele, Lea and Flood, 2014).
uint64_t Audit::draw() const {
  uint64_t word = buckets_ * 0x9e3779b97f4a7c15;
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9;
  word = (word ^ (word >> 27)) * 0x94d049bb133111eb;
  return word ^ (word >> 31);
}

void Audit::compare(const Sum& sum, const std::byte* found, const std::byte* again) const {
  const std::byte* const wrong = std::mismatch(found, found + sum.bytes, again).first;
  if (wrong == found + sum.bytes) return;
  const size_t index = static_cast<size_t>(wrong - found) / size_of(sum.dtype);
  const size_t at = index * size_of(sum.dtype);
  const auto name = [this](int member) { return setup_.names.at(static_cast<size_t>(member)); };
  throw DataFault(
      DataFault::Kind::kAudit, {sum.part, sum.maker, sum.first + index},
      "element " + std::to_string(sum.first + index) + " is " +
          text_of_number(sum.dtype, found + at) + " in " + sum.what + " on " + name(setup_.member) +
          ", but " + text_of_number(sum.dtype, again + at) + " if it is made again; " +
          name(sum.maker) +
          " had made it. A processor or memory of theirs is faulty, or the program has written to "
          "the tensor meanwhile (FARANDOLE_AUDIT found it)");
}

void Audit::finish() {
  copies_used_ = block_ + 1;
  if (setup_.audited) setup_.audited();
}

void ShmAudit::start(std::span<const Part> parts, uint64_t first, const ShmSchedule& plan) {
  parts_ = parts;
  if (members_ == 1) return;  // nothing is reduced
  audit_.start(parts, first, plan, Block{}, [](const Block& block) { return block.combines; });
}

void ShmAudit::keep(uint64_t number, const Block& block) const {
  if (!audit_.chosen(number)) return;
  for (const std::vector<Range>* ranges : {&block.sends, &block.reduces}) {
    for (const Range& range : *ranges) {
      const Part& part = parts_[range.part];
      if (!part.has(member_)) continue;
      kernels::copy(copy_of(range, member_), part.input + range.input, range.bytes);
    }
  }
}

void ShmAudit::check(uint64_t number, const Block& block) {
  if (!audit_.chosen(number)) return;
  for (const Range& range : block.reduces) check(range, member_);
  for (const Range& range : block.receives) check(range, range.member);
  audit_.finish();
}

void ShmAudit::check(const Range& range, int maker) {
  const Part& part = parts_[range.part];
  if (part.output == nullptr) return;
  inputs_.clear();
  for (int member = 0; member < members_; ++member) {
    if (part.has(member)) inputs_.push_back(copy_of(range, member));
  }
  again_.resize(std::max(again_.size(), range.bytes));
  const Signature& s = part.signature;
  const size_t element = size_of(s.dtype);
  kernels::reduce(s.dtype, s.reduce_op, again_.data(), inputs_.data(),
                  static_cast<int>(inputs_.size()), range.bytes / element, factors_of(part),
                  kernels::Loops::kScalar);
  audit_.compare({range.part, range.output / element, s.dtype, range.bytes, maker, "the result"},
                 part.output + range.output, again_.data());
}

}  // namespace farandole
