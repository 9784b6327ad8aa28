// SPDX-License-Identifier: Apache-2.0
// Learns which calls a process set repeats step after step, from the order in which they are published.
#pragma once

#include <cstdint>
#include <unordered_set>
#include <vector>

namespace farandole {

class Cycle {
 public:
  // repeats: how often the same calls must have come again.
  explicit Cycle(int repeats) : wanted_(repeats) {}

  // A call that may be bundled was published.
  void saw(uint32_t id);
  // The same calls have come often enough.
  bool settled() const { return repeats_ >= wanted_; }
  // Once settled: those of them that will come next, in the order of the last time, and those that have
  // come once more already.
  std::vector<uint32_t> next() const;
  const std::vector<uint32_t>& begun() const { return order_; }
  // Begins to learn anew.
  void restart();
  // What was learned did not fit: look twice as long from now on.
  void mistrust();

 private:
  static constexpr int kMaxWanted = 1024;
  int wanted_;
  int repeats_ = 0;
  std::unordered_set<uint32_t> previous_;  // calls of one cycle
  std::unordered_set<uint32_t> seen_;      // of the one under way
  std::vector<uint32_t> order_;            // the same
  std::vector<uint32_t> whole_;            // the last one
};

}  // namespace farandole
