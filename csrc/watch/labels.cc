// SPDX-License-Identifier: Apache-2.0
#include "watch/labels.h"

#include <algorithm>
#include <cstring>

namespace farandole {
namespace {

constexpr size_t kFirst = 1;  // not 0, because 0 is kNoLabel

}  // namespace

std::string_view LabelMemory::at(uint32_t label) const {
  const uint64_t end = used.load(std::memory_order_acquire);
  uint32_t length = 0;
  if (label < kFirst || label + sizeof(length) > end) return {};
  if (end > kBytes) return {};
  std::memcpy(&length, text + label, sizeof(length));
  if (length > end - label - sizeof(length)) return {};
  return {text + label + sizeof(length), std::min(length, kLongest)};
}

Labels::Labels(LabelMemory& memory) : memory_(memory) {
  memory_.used.store(kFirst, std::memory_order_release);
  lost_ = append("(name not kept)");
}

uint32_t Labels::label_of(std::string_view name) {
  if (name.empty()) return kNoLabel;
  std::string key(name);
  if (auto found = known_.find(key); found != known_.end()) return found->second;
  const uint32_t label = append(name);
  if (label != lost_) known_.emplace(std::move(key), label);
  return label;
}

uint32_t Labels::append(std::string_view name) {
  const uint64_t begin = memory_.used.load(std::memory_order_relaxed);
  const auto length = static_cast<uint32_t>(name.size());
  const size_t whole = sizeof(length) + length;
  if (begin + whole > LabelMemory::kBytes) return lost_;
  std::memcpy(memory_.text + begin, &length, sizeof(length));
  std::memcpy(memory_.text + begin + sizeof(length), name.data(), length);
  memory_.used.store(begin + whole, std::memory_order_release);
  return static_cast<uint32_t>(begin);
}

}  // namespace farandole
