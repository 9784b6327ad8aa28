// SPDX-License-Identifier: Apache-2.0
#include "control/hosts/host_tree.h"

#include <algorithm>

namespace farandole {

HostTree HostTree::of(Rank own, const std::vector<Rank>& node, int fan_out) {
  std::vector<Rank> leaders;
  for (Rank r = 0; r < static_cast<Rank>(node.size()); ++r) {
    if (node[static_cast<size_t>(r)] == r) leaders.push_back(r);
  }
  auto index_of = [&](Rank leader) {
    return std::ranges::lower_bound(leaders, leader) - leaders.begin();
  };
  auto above = [&](auto host) { return (host - 1) / fan_out; };
  auto own_host = index_of(own);
  HostTree tree;
  if (own_host > 0) tree.parent = leaders[static_cast<size_t>(above(own_host))];
  for (auto host = own_host * fan_out + 1;
       host <= own_host * fan_out + fan_out && host < std::ssize(leaders); ++host) {
    tree.children.push_back({leaders[static_cast<size_t>(host)], {}});
  }
  for (Rank r = 0; r < static_cast<Rank>(node.size()); ++r) {
    auto host = index_of(node[static_cast<size_t>(r)]);
    while (host > 0 && above(host) != own_host) host = above(host);
    if (host == 0) continue;  // not in a child's branch
    tree.children[static_cast<size_t>(host - own_host * fan_out - 1)].ranks.push_back(r);
  }
  return tree;
}

}  // namespace farandole
