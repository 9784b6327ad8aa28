// SPDX-License-Identifier: Apache-2.0
// The tree of links between hosts' leaders: up to kFanOut link to rank 0, the root, and more in further levels.
#pragma once

#include <vector>

#include "base/types.h"

namespace farandole {

struct HostTree {
  static constexpr int kFanOut = 32;
  struct Branch {
    Rank leader = 0;
    std::vector<Rank> ranks;  // those of its host and of all hosts below, ascending
  };
  Rank parent = -1;  // leader of the host above; -1: this is the root, or not a leader
  std::vector<Branch> children;

  // By rank, the rank that forwards its reports: its leader; for a leader, the leader above; for rank 0, -1.
  static std::vector<Rank> above(const std::vector<Rank>& node, int fan_out = kFanOut);
  // `node`: by rank, the lowest rank of its host. `own`: a leader.
  static HostTree of(Rank own, const std::vector<Rank>& node, int fan_out = kFanOut);
};

}  // namespace farandole
