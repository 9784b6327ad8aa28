// SPDX-License-Identifier: Apache-2.0
// The topology of a world: which ranks share a host, and the place of this rank among them.
#pragma once

#include <vector>

#include "base/types.h"

namespace farandole {

struct Topology {
  Rank rank = 0;
  int size = 1;
  std::vector<Rank> node;   // for each rank, the lowest rank on its host
  std::vector<Rank> local;  // ranks on this rank's host, ascending
  int local_rank = 0;
  int cross_rank = 0;  // index of this host among the hosts that have this local_rank
  int cross_size = 1;
  bool homogeneous = true;  // every host holds the same number of ranks
  int world = 0;            // number of this world; each restart increments it

  // Throws Error(kInvalidArgument) if `node` contradicts itself.
  static Topology of(Rank rank, std::vector<Rank> node);
  Rank leader() const { return local.front(); }
  // Returns the local ranks of those `ranks` that are on this host. `ranks` must be ascending.
  std::vector<int> locals_among(const std::vector<Rank>& ranks) const;
  int local_size() const { return static_cast<int>(local.size()); }
};

}  // namespace farandole
