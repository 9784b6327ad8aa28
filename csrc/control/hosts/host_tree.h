// SPDX-License-Identifier: Apache-2.0
// The tree of links between leaders: up to kFanOut hosts link to the root, more in further levels. A host's
// leader is its lowest rank; the root is rank 0.
#pragma once

#include <vector>

#include "base/types.h"

namespace farandole {

struct HostTree {
  static constexpr int kFanOut = 32;
  struct Branch {
    Rank leader = 0;
    std::vector<Rank> ranks;  // of its host and all hosts below, ascending
  };
  Rank parent = -1;  // leader of the host above; -1: this is the root, or no leader
  std::vector<Branch> children;

  // By rank, who passes its reports on: the leader of its host; for a leader, that of the host above; for rank 0: -1.
  static std::vector<Rank> above(const std::vector<Rank>& node, int fan_out = kFanOut);
  // `node`: by rank, the lowest rank of its host; `own`: a leader.
  static HostTree of(Rank own, const std::vector<Rank>& node, int fan_out = kFanOut);
};

}  // namespace farandole
