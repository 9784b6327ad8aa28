// SPDX-License-Identifier: Apache-2.0
#include "control/hosts/host_relay.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/logging.h"

namespace farandole {
namespace {

std::vector<Rank> ranks_below(const Topology& topology, const HostTree& tree) {
  std::vector<Rank> ranks = topology.local;
  for (const HostTree::Branch& child : tree.children) {
    ranks.insert(ranks.end(), child.ranks.begin(), child.ranks.end());
  }
  std::ranges::sort(ranks);
  return ranks;
}

}  // namespace

HostRelay::HostRelay(Setup setup)
    : HostController(std::move(setup)),
      aggregator_(setup_.topology.size, ranks_below(setup_.topology, setup_.tree),
                  setup_.tree.parent != 0) {}

bool HostRelay::step() {
  const int64_t now = now_ns();
  bool moved = setup_.channel.drain([&](Rank from, ByteView message) {
    try {
      aggregator_.receive(from, message, now);
    } catch (const Error& error) {
      report(from, Lost{broke_protocol(from, error)});
    }
  });
  moved |= setup_.hosts->drain([this](Rank peer, ByteView message) { hear(peer, message); });
  for (auto& [rank, failure] : take_lost()) {
    report(rank, Lost{std::move(failure)});
    moved = true;
  }
  if (now >= aggregator_.next_tick()) {
    aggregator_.tick(now);
    moved = true;
  }
  if (!moved) return false;
  if (ByteString up = aggregator_.take(now_ns()); !up.empty())
    setup_.hosts->send(setup_.tree.parent, up);
  send_down();
  return true;
}

void HostRelay::hear(Rank peer, ByteView message) {
  const bool above = peer == setup_.tree.parent;
  if (above) return message.empty() ? close() : read_log(message);
  auto child = std::ranges::find(setup_.tree.children, peer, &HostTree::Branch::leader);
  if (message.empty()) {
    if (!over_) report(peer, Lost{host_is_gone(*child)});
    return;
  }
  try {
    for_each_record(message, child->ranks, [&](const std::vector<Rank>& ranks, ByteView bytes) {
      aggregator_.receive(ranks, child->ranks, bytes, now_ns());
    });
  } catch (const Error& error) {
    report(peer, Lost{broke_protocol(peer, error)});
  }
}

void HostRelay::read_log(ByteView entries) {
  Decoder in(entries);
  while (!in.empty()) {
    ByteView bytes = in.get_bytes();
    const Entry entry = decode_entry(bytes);
    aggregator_.read(entry);
    read(entry);
    publish(bytes);
  }
}

void HostRelay::read(const Entry& entry) {
  over_ = over_ || std::holds_alternative<Abort>(entry) || std::holds_alternative<Stop>(entry);
  if (auto* open = std::get_if<OpenSet>(&entry)) share_staging(open->set, open->ranks);
  auto* gpu = std::get_if<SetUp>(&entry);
  if (gpu && gpu->backend == BackendKind::kStaged) share_staging(gpu->set, gpu->ranks);
  if (auto* where = std::get_if<CollectStacks>(&entry)) {
    answer_for_stopped(where->ranks,
                       [this](Rank rank, const StackReport& answer) { report(rank, answer); });
  }
}

void HostRelay::report(Rank from, const Report& report) {
  encoded_.clear();
  encode(report, encoded_);
  aggregator_.receive(from, encoded_, now_ns());
}

// The link to the host above has ended: aborts the hosts below.
void HostRelay::close() {
  if (std::exchange(over_, true)) return;
  const Rank above = setup_.tree.parent;
  Abort abort{{ErrorCode::kPeer, "the connection to " + rank_on_host(above) + ", through which " +
                                     rank_on_host(setup_.topology.rank) +
                                     " hears of the other hosts," + how_lost(above)}};
  log(LogLevel::kError, abort.failure.text);
  encoded_.clear();
  encode(Entry(abort), encoded_);
  publish(encoded_);
  // Where only what comes from above is lost, the hosts above learn why from here; else nobody reads this.
  report(setup_.topology.rank, Lost{std::move(abort.failure)});
}

}  // namespace farandole
