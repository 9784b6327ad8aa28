// SPDX-License-Identifier: Apache-2.0
// Names in shared memory, each of them once: events hold a number instead.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>

namespace farandole {

constexpr uint32_t kNoLabel = 0;  // of unnamed calls

// Written by the rank that owns it; whole names only are ever visible.
struct LabelMemory {
  static constexpr size_t kBytes = 512 << 10;
  std::atomic<uint64_t> used;
  char text[kBytes];

  // Any process. Numbers that were never given out read as "".
  std::string_view at(uint32_t label) const;
};

// Not thread-safe.
class Labels {
 public:
  explicit Labels(LabelMemory& memory);
  // A full memory knows no further names: they all are "(name not kept)".
  uint32_t label_of(std::string_view name);

 private:
  uint32_t append(std::string_view name);
  LabelMemory& memory_;
  std::unordered_map<std::string, uint32_t> known_;
  uint32_t lost_ = kNoLabel;
};

}  // namespace farandole
