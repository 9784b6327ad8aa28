// SPDX-License-Identifier: Apache-2.0
#include "control/hosts/host_controller.h"

#include "base/error.h"

namespace farandole {

void HostController::publish(ByteView entry) {
  setup_.channel.publish(entry);
  if (!setup_.tree.children.empty()) Encoder(down_).put_bytes(entry);
}

void HostController::send_down() {
  setup_.channel.wake_members();
  if (down_.empty()) return;
  for (const HostTree::Branch& child : setup_.tree.children)
    setup_.hosts->send(child.leader, down_);
  down_.clear();
}

void HostController::share_staging(SetId set, const std::vector<Rank>& ranks) {
  const Topology& topology = setup_.topology;
  const std::vector<int> locals = topology.locals_among(ranks);
  if (locals.empty()) return;
  size_t bytes = setup_.staging_bytes(ranks);
  Segment segment = setup_.links.give("farandole-staging", bytes, locals);
  if (locals.front() == topology.local_rank) staging_.emplace(set, std::move(segment));
}

Segment HostController::take_staging(SetId set) {
  auto node = staging_.extract(set);
  return node ? std::move(node.mapped()) : Segment{};
}

void HostController::lose(Rank rank, Failure failure) {
  std::lock_guard lock(lost_mutex_);
  lost_.emplace_back(rank, std::move(failure));
  has_lost_ = true;
}

std::vector<std::pair<Rank, Failure>> HostController::take_lost() {
  if (!has_lost_) return {};
  std::lock_guard lock(lost_mutex_);
  has_lost_ = false;
  return std::exchange(lost_, {});
}

std::string HostController::rank_on_host(Rank rank) const {
  return "rank " + std::to_string(rank) + " on " + setup_.host_names.at(static_cast<size_t>(rank));
}

std::string HostController::how_lost(Rank leader) const {
  const std::string trouble = setup_.hosts->trouble_of(leader);
  if (trouble.empty()) {
    return " has ended: that rank died; see its own output for the reason (killed, out of memory, "
           "crashed?)";
  }
  return " is lost: " + trouble;
}

Failure HostController::broke_protocol(Rank rank, const Error& error) {
  return {error.code(),
          "rank " + std::to_string(rank) + " broke the control protocol: " + error.what()};
}

Failure HostController::host_is_gone(const HostTree::Branch& branch) const {
  return {ErrorCode::kPeer, "the connection to " + rank_on_host(branch.leader) +
                                ", which speaks for " + text_of_ranks(branch.ranks) + "," +
                                how_lost(branch.leader)};
}

}  // namespace farandole
