// SPDX-License-Identifier: Apache-2.0
// A table of names in shared memory. Each name is stored once, and events store its number (the label).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>

namespace farandole {

constexpr uint32_t kNoLabel = 0;  // for unnamed calls

// Only one rank writes the table. Readers see only complete names.
struct LabelMemory {
  static constexpr size_t kBytes = 512 << 10;
  std::atomic<uint64_t> used;
  char text[kBytes];

  // May be called from any process. Returns "" for an unknown label. Truncates long names, so that a hostile writer
  // cannot inflate every event.
  static constexpr uint32_t kLongest = 1024;
  std::string_view at(uint32_t label) const;
};

// Writes a LabelMemory. Not thread-safe: see Recorder::label_of().
class Labels {
 public:
  explicit Labels(LabelMemory& memory);
  // Once the memory is full, every new name gets the label of "(name not kept)".
  uint32_t label_of(std::string_view name);

 private:
  uint32_t append(std::string_view name);
  LabelMemory& memory_;
  std::unordered_map<std::string, uint32_t> known_;
  uint32_t lost_ = kNoLabel;
};

}  // namespace farandole
