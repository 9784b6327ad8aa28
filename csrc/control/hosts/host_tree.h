// SPDX-License-Identifier: Apache-2.0
// The tree of links between hosts' leaders. Each leader has at most kFanOut children; rank 0 is the root.
#pragma once

#include <vector>

#include "base/types.h"

namespace farandole {

struct HostTree {
  static constexpr int kFanOut = 32;
  struct Branch {
    Rank leader = 0;
    std::vector<Rank> ranks;  // ranks of the leader's host and of all hosts below, ascending
  };
  Rank parent = -1;  // leader of the host above; -1: this is the root, or not a leader
  std::vector<Branch> children;

  // For each rank, the rank that forwards its reports: its leader; for a leader, the leader above; for rank 0, -1.
  static std::vector<Rank> above(const std::vector<Rank>& node, int fan_out = kFanOut);
  // Returns the tree as the leader `own` sees it. `node`: for each rank, the lowest rank on its host.
  static HostTree of(Rank own, const std::vector<Rank>& node, int fan_out = kFanOut);
};

}  // namespace farandole
