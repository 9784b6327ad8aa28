// SPDX-License-Identifier: Apache-2.0
// The tree of links between the leaders of hosts. Each leader has at most kFanOut children. Rank 0 is the root.
#pragma once

#include <vector>

#include "base/types.h"

namespace farandole {

struct HostTree {
  static constexpr int kFanOut = 32;
  struct Branch {
    Rank leader = 0;
    std::vector<Rank> ranks;  // the ranks of the leader's host and of all hosts below, ascending
  };
  Rank parent = -1;  // leader of the host above; -1 for the root, or if this rank does not lead
  std::vector<Branch> children;

  // Returns for each rank the rank that forwards its reports. This is the leader of its host or, for a leader, the
  // leader of the host above. For rank 0 it is -1.
  static std::vector<Rank> above(const std::vector<Rank>& node, int fan_out = kFanOut);
  // Returns the tree as the leader `own` sees it. `node` holds, for each rank, the lowest rank on its host.
  static HostTree of(Rank own, const std::vector<Rank>& node, int fan_out = kFanOut);
};

}  // namespace farandole
