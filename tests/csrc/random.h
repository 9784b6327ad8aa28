// SPDX-License-Identifier: Apache-2.0
// Randomness that is the same on every machine and standard library (SplitMix64), for seeded tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace farandole::check {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  // 0 .. limit-1
  uint64_t below(uint64_t limit) { return limit < 2 ? 0 : next() % limit; }
  // first .. last
  int between(int first, int last) {
    return first + static_cast<int>(below(static_cast<uint64_t>(last - first) + 1));
  }
  bool chance(double probability) { return unit() < probability; }
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }

  template <class T>
  const T& pick(const std::vector<T>& items) {
    return items[below(items.size())];
  }
  template <class T>
  void shuffle(std::vector<T>& items) {
    for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[below(i)]);
  }

 private:
  uint64_t state_;
};

}  // namespace farandole::check
