// SPDX-License-Identifier: Apache-2.0
// Detects, for StepPredictor, which calls a set repeats every step, from their order of publication.
#pragma once

#include <cstdint>
#include <unordered_set>
#include <vector>

namespace farandole {

class Cycle {
 public:
  // `repeats`: how often the same calls must repeat.
  explicit Cycle(int repeats) : wanted_(repeats) {}

  // A call that can be predicted was published.
  void saw(uint32_t id);
  // Whether the same calls have repeated often enough.
  bool settled() const { return repeats_ >= wanted_; }
  // Once settled: the calls still to come in this step, in the order of the last step; begun(): those that
  // have come already.
  std::vector<uint32_t> next() const;
  const std::vector<uint32_t>& begun() const { return order_; }
  // Starts learning anew.
  void restart();
  // A prediction did not fit: doubles the repeats needed from now on.
  void mistrust();

 private:
  static constexpr int kMaxWanted = 1024;
  int wanted_;
  int repeats_ = 0;
  std::unordered_set<uint32_t> previous_;  // calls of one step
  std::unordered_set<uint32_t> seen_;      // calls of the current step
  std::vector<uint32_t> order_;            // seen_, in order
  std::vector<uint32_t> whole_;            // the last whole step, in order
};

}  // namespace farandole
