// SPDX-License-Identifier: Apache-2.0
// How far each member is: numbers of blocks over all buckets, in shared memory, only increasing. Zeroed
// memory is valid. All accesses are seq_cst, because a check of a sleeper's flag follows them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace farandole {

// One member's counters; only that member writes them.
struct HostProgress {
  using Counter = std::atomic<uint64_t>;
  alignas(64) Counter staged{0};
  alignas(64) Counter reduced{0};
  alignas(64) Counter consumed{0};
};
static_assert(HostProgress::Counter::is_always_lock_free && sizeof(HostProgress) == 192);

// The counters of all members of a set.
class HostProgressTable {
 public:
  using Column = HostProgress::Counter HostProgress::*;

  HostProgressTable(std::byte* memory, int members)
      : rows_(reinterpret_cast<HostProgress*>(memory)), members_(members) {}

  static size_t bytes_needed(int members) {
    return static_cast<size_t>(members) * sizeof(HostProgress);
  }

  uint64_t load(int member, Column column) const { return (rows_[member].*column).load(); }
  void store(int member, Column column, uint64_t blocks) { (rows_[member].*column).store(blocks); }

  // Whether each of members [0, count) has done at least `blocks`.
  bool all_reached(Column column, uint64_t blocks, int count) const {
    for (int member = 0; member < count; ++member) {
      if (load(member, column) < blocks) return false;
    }
    return true;
  }
  bool all_reached(Column column, uint64_t blocks) const {
    return all_reached(column, blocks, members_);
  }

 private:
  HostProgress* const rows_;
  const int members_;
};

}  // namespace farandole
