// SPDX-License-Identifier: Apache-2.0
// Ids of requests, in order. Consecutive ones take no more room than one: the log gives ids in the order in which
// calls begin, so those of a batch usually follow each other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

namespace farandole {

class IdRuns {
 public:
  static constexpr size_t kMost = size_t{1} << 16;  // ids of one message
  struct Run {
    uint32_t first = 0;
    uint32_t count = 0;
    bool operator==(const Run&) const = default;
  };

  IdRuns() = default;
  IdRuns(std::initializer_list<uint32_t> ids) {
    for (uint32_t id : ids) add(id);
  }

  void add(uint32_t id) { add(Run{id, 1}); }
  void add(Run run) {
    size_ += run.count;
    if (!runs_.empty() && runs_.back().first + runs_.back().count == run.first) {
      runs_.back().count += run.count;
    } else {
      runs_.push_back(run);
    }
  }
  void clear() {
    runs_.clear();
    size_ = 0;
  }
  template <class Visitor>
  void for_each(Visitor&& visit) const {
    for (const Run& run : runs_) {
      for (uint32_t i = 0; i < run.count; ++i) visit(run.first + i);
    }
  }
  bool empty() const { return size_ == 0; }
  bool full() const { return size_ >= kMost; }
  size_t size() const { return size_; }
  const std::vector<Run>& runs() const { return runs_; }
  bool operator==(const IdRuns&) const = default;

 private:
  std::vector<Run> runs_;
  size_t size_ = 0;
};

}  // namespace farandole
