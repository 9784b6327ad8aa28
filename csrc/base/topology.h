// SPDX-License-Identifier: Apache-2.0
// Which ranks share a host, and this rank's place among them.
#pragma once

#include <vector>

#include "base/types.h"

namespace farandole {

struct Topology {
  Rank rank = 0;
  int size = 1;
  std::vector<Rank> node;   // by rank: the lowest rank of its host
  std::vector<Rank> local;  // ranks on this rank's host, ascending
  int local_rank = 0;
  int cross_rank = 0;  // index of this host among the hosts that have this local rank
  int cross_size = 1;
  bool homogeneous = true;  // every host holds the same number of ranks
  int world = 0;            // counts the worlds of this job

  // Throws Error(kInvalidArgument) if `node` is inconsistent.
  static Topology of(Rank rank, std::vector<Rank> node);
  Rank leader() const { return local.front(); }
  // Local ranks of those members of `ranks` (ascending) that are on this host.
  std::vector<int> locals_among(const std::vector<Rank>& ranks) const;
  int local_size() const { return static_cast<int>(local.size()); }
};

}  // namespace farandole
