// SPDX-License-Identifier: Apache-2.0
#include "control/hosts/host_leader.h"

#include "base/error.h"

namespace farandole {

void HostLeader::publish(ByteView entry) {
  setup_.channel->publish(entry);
  if (!setup_.tree.children.empty()) Encoder(down_).put_bytes(entry);
}

void HostLeader::send_down() {
  setup_.channel->ring_members();
  if (down_.empty()) return;
  for (const HostTree::Branch& child : setup_.tree.children)
    setup_.hosts->send(child.leader, down_);
  down_.clear();
}

void HostLeader::share_staging(SetId set, const std::vector<Rank>& ranks) {
  const Topology& topology = setup_.topology;
  const std::vector<int> locals = topology.locals_among(ranks);
  if (locals.empty()) return;
  size_t bytes = setup_.staging_bytes(ranks);
  Segment segment = setup_.links.give("farandole-staging", bytes, locals);
  if (locals.front() == topology.local_rank) staging_[set] = std::move(segment);
}

Segment HostLeader::take_staging(SetId set) {
  auto node = staging_.extract(set);
  return node ? std::move(node.mapped()) : Segment{};
}

void HostLeader::lose(Rank rank, Failure failure) {
  std::lock_guard lock(lost_mutex_);
  lost_.emplace_back(rank, std::move(failure));
  has_lost_ = true;
}

std::vector<std::pair<Rank, Failure>> HostLeader::take_lost() {
  if (!has_lost_) return {};
  std::lock_guard lock(lost_mutex_);
  has_lost_ = false;
  return std::exchange(lost_, {});
}

std::string HostLeader::place_of(Rank rank) const {
  return "rank " + std::to_string(rank) + " on " + setup_.host_names.at(static_cast<size_t>(rank));
}

std::string HostLeader::how_lost(Rank leader) const {
  const std::string trouble = setup_.hosts->trouble_of(leader);
  if (trouble.empty()) return " has ended: that rank died";
  return " is lost (" + trouble + "): that host or the network between the hosts is down";
}

Failure HostLeader::host_is_gone(const HostTree::Branch& branch) const {
  return {ErrorCode::kPeer, "the connection to " + place_of(branch.leader) + ", which speaks for " +
                                text_of_ranks(branch.ranks) + "," + how_lost(branch.leader)};
}

}  // namespace farandole
