// SPDX-License-Identifier: Apache-2.0
#include "base/topology.h"

#include <algorithm>
#include <map>

#include "base/error.h"

namespace farandole {

Topology Topology::of(Rank rank, std::vector<Rank> node) {
  Topology t;
  t.rank = rank;
  t.size = static_cast<int>(node.size());
  t.node = std::move(node);
  std::map<Rank, std::vector<Rank>> hosts;
  for (Rank r = 0; r < t.size; ++r) hosts[t.node[static_cast<size_t>(r)]].push_back(r);
  for (auto& [lowest, ranks] : hosts) {
    if (lowest != ranks.front()) {
      throw Error(ErrorCode::kInvalidArgument, "the ranks disagree about who shares a host");
    }
    t.homogeneous &= ranks.size() == hosts.begin()->second.size();
  }
  t.local = hosts.at(t.node.at(static_cast<size_t>(rank)));
  t.local_rank =
      static_cast<int>(std::find(t.local.begin(), t.local.end(), rank) - t.local.begin());
  t.cross_size = 0;
  for (auto& [lowest, ranks] : hosts) {
    if (static_cast<int>(ranks.size()) <= t.local_rank) continue;
    if (lowest == t.leader()) t.cross_rank = t.cross_size;
    ++t.cross_size;
  }
  return t;
}

std::vector<int> Topology::locals_among(const std::vector<Rank>& ranks) const {
  std::vector<int> locals;
  for (int i = 0; i < local_size(); ++i) {
    if (std::binary_search(ranks.begin(), ranks.end(), local[static_cast<size_t>(i)])) {
      locals.push_back(i);
    }
  }
  return locals;
}

}  // namespace farandole
