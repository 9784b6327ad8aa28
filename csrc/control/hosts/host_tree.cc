// SPDX-License-Identifier: Apache-2.0
#include "control/hosts/host_tree.h"

#include <algorithm>
#include <utility>

namespace farandole {

std::vector<Rank> HostTree::above(const std::vector<Rank>& node, int fan_out) {
  std::vector<Rank> above = node, leaders;
  for (Rank r = 0; std::cmp_less(r, node.size()); ++r) {
    if (node[static_cast<size_t>(r)] != r) continue;
    const auto host = std::ssize(leaders);
    above[static_cast<size_t>(r)] =
        host == 0 ? -1 : leaders[static_cast<size_t>((host - 1) / fan_out)];
    leaders.push_back(r);
  }
  return above;
}

HostTree HostTree::of(Rank own, const std::vector<Rank>& node, int fan_out) {
  const std::vector<Rank> above = HostTree::above(node, fan_out);
  const auto up = [&](Rank r) { return above[static_cast<size_t>(r)]; };
  HostTree tree;
  tree.parent = up(own);
  for (Rank r = 0; std::cmp_less(r, node.size()); ++r) {
    Rank leader = node[static_cast<size_t>(r)];
    while (leader >= 0 && up(leader) != own) leader = up(leader);
    if (leader < 0) continue;  // the rank is not in the branch of a child
    if (leader == r) tree.children.push_back({leader, {}});
    std::ranges::find(tree.children, leader, &Branch::leader)->ranks.push_back(r);
  }
  return tree;
}

}  // namespace farandole
