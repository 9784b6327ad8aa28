// SPDX-License-Identifier: Apache-2.0
// Hosts apart from the root's: their ranks' reports go through an aggregator, and the log comes through it. Where
// there are more than link to the root, hosts are below hosts.
#include <algorithm>
#include <map>

#include "control/simulator/simulator.h"

namespace farandole::simulation {
namespace {

constexpr int64_t kRelayNs = 3000;  // at most

}  // namespace

// Every other world has several hosts; their ranks lie anyhow, and so few link to one that there are levels.
void Simulator::settle_on_hosts() {
  const int size = program_.settings.size;
  leader_of_.assign(static_cast<size_t>(size), -1);
  if (size < 3 || random_.chance(0.5)) return;
  const int hosts = size > 64 ? size / 8 : random_.between(2, std::min(size, 6));
  std::map<Rank, std::vector<Rank>> ranks;  // by leader
  std::vector<Rank> node;
  const bool in_turns = random_.chance(0.5);
  for (Rank r = 0; r < size; ++r) {
    const int host = in_turns ? r % hosts : r * hosts / size;
    node.push_back(in_turns ? host : (host * size + hosts - 1) / hosts);
    ranks[node.back()].push_back(r);
  }
  const int fan_out = random_.between(1, 4);
  for (auto& [leader, its_ranks] : ranks) {
    if (leader == 0) continue;
    HostTree tree = HostTree::of(leader, node, fan_out);
    std::vector<Rank> below = its_ranks;
    for (const HostTree::Branch& child : tree.children)
      below.insert(below.end(), child.ranks.begin(), child.ranks.end());
    std::ranges::sort(below);
    Host& host = hosts_.try_emplace(leader, size, tree, its_ranks, below).first->second;
    if (tree.parent == 0) host.group = coordinator_.add_group(below);
    for (Rank r : its_ranks) leader_of_[static_cast<size_t>(r)] = leader;
  }
}

Simulator::Host* Simulator::host_of(Rank rank) {
  const Rank leader = leader_of_[static_cast<size_t>(rank)];
  return leader < 0 ? nullptr : &hosts_.at(leader);
}

void Simulator::expect_relay(Host& host, int64_t in_ns) {
  after(in_ns, What::kRelay, host.ranks.front());
}

// The log first, as those below will read it; then some of their reports.
void Simulator::relay(Rank leader) {
  Host& host = hosts_.at(leader);
  host.relaying = false;
  read_log(host);
  for (size_t most = 1 + random_.below(2 * host.below.size()); most > 0; --most) {
    if (host.reports.empty()) break;
    auto& [from, message] = host.reports.front();
    receive_report(host, from, message);
    host.reports.pop_front();
  }
  host.aggregator.tick(now_);
  if (ByteString up = host.aggregator.take(now_); !up.empty()) {
    if (host.tree.parent == 0) {
      send(leader, std::move(up));
    } else {
      Host& above = hosts_.at(host.tree.parent);
      above.reports.emplace_back(leader, std::move(up));
      if (!std::exchange(above.relaying, true)) expect_relay(above, delay(kRelayNs));
    }
  }
  const int64_t tick = host.aggregator.next_tick();
  if (!host.reports.empty()) {
    host.relaying = true;
    expect_relay(host, delay(kRelayNs));
  } else if (tick != INT64_MAX) {
    expect_relay(host, std::max<int64_t>(tick - now_, 1));
  }
}

// As far as the host above has read it.
void Simulator::read_log(Host& host) {
  const size_t end = host.tree.parent == 0 ? log_.size() : hosts_.at(host.tree.parent).cursor;
  if (host.cursor == end) return;
  while (host.cursor < end) host.aggregator.read(log_[host.cursor++]);
  for (Rank r : host.ranks) {
    Member& m = member(r);
    if (m.rank->dead() || std::exchange(m.reading, true)) continue;
    after(delay(kRelayNs), What::kRead, r);
  }
  for (const HostTree::Branch& child : host.tree.children) {
    Host& lower = hosts_.at(child.leader);
    if (!std::exchange(lower.relaying, true)) expect_relay(lower, delay(kRelayNs));
  }
}

void Simulator::receive_report(Host& host, Rank from, ByteView message) {
  auto child = std::ranges::find(host.tree.children, from, &HostTree::Branch::leader);
  if (child == host.tree.children.end()) return host.aggregator.receive(from, message, now_);
  for_each_record(message, child->ranks, [&](const std::vector<Rank>& ranks, ByteView bytes) {
    host.aggregator.receive(ranks, child->ranks, bytes, now_);
    statistics_.nested_reports += ranks.empty();
  });
}

void Simulator::receive_records(Rank leader, ByteView message) {
  const Host& host = hosts_.at(leader);
  for_each_record(message, host.below, [&](const std::vector<Rank>& ranks, ByteView bytes) {
    const Report report = decode_report(bytes);
    for (Rank r : ranks) take(r, report);
    if (ranks.empty()) {
      ++statistics_.group_reports;
      return coordinator_.receive_all(host.group, report, now_);
    }
    for (Rank r : ranks) coordinator_.receive(r, report, now_);
  });
}

}  // namespace farandole::simulation
