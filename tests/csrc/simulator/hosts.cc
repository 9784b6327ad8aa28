// SPDX-License-Identifier: Apache-2.0
// Hosts apart from the root's: their ranks' reports go through an aggregator, and the log comes through it.
#include <algorithm>
#include <map>

#include "simulator.h"

namespace farandole::simulation {
namespace {

constexpr int64_t kRelayNs = 3000;  // at most

}  // namespace

// Every other world has several hosts; their ranks lie anyhow.
void Simulator::settle_on_hosts() {
  const int size = program_.settings.size;
  leader_of_.assign(static_cast<size_t>(size), -1);
  if (size < 3 || random_.chance(0.5)) return;
  const int hosts = size > 64 ? size / 8 : random_.between(2, std::min(size, 6));
  std::map<int, std::vector<Rank>> ranks;
  const bool in_turns = random_.chance(0.5);
  for (Rank r = 0; r < size; ++r) ranks[in_turns ? r % hosts : r * hosts / size].push_back(r);
  for (auto& [number, its_ranks] : ranks) {
    if (its_ranks.front() == 0) continue;
    const int group = coordinator_.add_group(its_ranks);
    hosts_.try_emplace(its_ranks.front(), size, its_ranks, group);
    for (Rank r : its_ranks) leader_of_[static_cast<size_t>(r)] = its_ranks.front();
  }
}

Simulator::Host* Simulator::host_of(Rank rank) {
  const Rank leader = leader_of_[static_cast<size_t>(rank)];
  return leader < 0 ? nullptr : &hosts_.at(leader);
}

void Simulator::expect_relay(Host& host, int64_t in_ns) {
  after(in_ns, What::kRelay, host.ranks.front());
}

// The log first, as its ranks will read it; then some of their reports.
void Simulator::relay(Rank leader) {
  Host& host = hosts_.at(leader);
  host.relaying = false;
  const bool news = host.cursor < log_.size();
  while (host.cursor < log_.size()) host.aggregator.read(log_[host.cursor++]);
  for (Rank r : host.ranks) {
    Member& m = member(r);
    if (!news || m.rank->dead() || std::exchange(m.reading, true)) continue;
    after(delay(kRelayNs), What::kRead, r);
  }
  for (size_t most = 1 + random_.below(2 * host.ranks.size()); most > 0; --most) {
    if (host.reports.empty()) break;
    auto& [from, bytes] = host.reports.front();
    host.aggregator.receive(from, bytes, now_);
    host.reports.pop_front();
  }
  host.aggregator.tick(now_);
  if (ByteString up = host.aggregator.take(now_); !up.empty()) send(leader, std::move(up));
  const int64_t tick = host.aggregator.next_tick();
  if (!host.reports.empty()) {
    host.relaying = true;
    expect_relay(host, delay(kRelayNs));
  } else if (tick != INT64_MAX) {
    expect_relay(host, std::max<int64_t>(tick - now_, 1));
  }
}

void Simulator::receive_records(Rank leader, ByteView message) {
  const Host& host = hosts_.at(leader);
  for_each_record(message, host.ranks, [&](const std::vector<Rank>& ranks, ByteView bytes) {
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
