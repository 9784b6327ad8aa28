// SPDX-License-Identifier: Apache-2.0
#include "control/coordinator/cycle.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace farandole {

void Cycle::saw(uint32_t id) {
  if (seen_.contains(id)) {  // a step ends when its first call repeats
    repeats_ = 0;
    previous_ = std::exchange(seen_, {});
    order_.clear();
  }
  if (!previous_.contains(id)) repeats_ = 0;
  seen_.insert(id);
  order_.push_back(id);
  if (seen_.size() != previous_.size() || seen_ != previous_) return;
  ++repeats_;
  whole_ = std::exchange(order_, {});
  seen_.clear();
}

std::vector<uint32_t> Cycle::next() const {
  std::vector<uint32_t> next;
  std::ranges::copy_if(whole_, std::back_inserter(next),
                       [this](uint32_t id) { return !seen_.contains(id); });
  return next;
}

void Cycle::restart() {
  repeats_ = 0;
  previous_.clear();
  seen_.clear();
  order_.clear();
}

void Cycle::mistrust() {
  wanted_ = std::min(2 * wanted_, kMaxWanted);
  restart();
}

}  // namespace farandole
