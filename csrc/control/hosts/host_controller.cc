// SPDX-License-Identifier: Apache-2.0
#include "control/hosts/host_controller.h"

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

void HostController::share_memory(const Entry& entry) {
  if (auto* open = std::get_if<OpenSet>(&entry)) share_staging(open->set, open->ranks);
  auto* gpu = std::get_if<OpenGpu>(&entry);
  if (gpu && gpu->backend == BackendKind::kStaged) share_staging(gpu->set, gpu->ranks);
}

void HostController::share_staging(SetId set, const std::vector<Rank>& ranks) {
  const Topology& topology = setup_.topology;
  const std::vector<int> locals = topology.locals_among(ranks);
  if (locals.empty()) return;
  Segment segment =
      setup_.links.give(set, "farandole-staging", setup_.staging_size(set, ranks), locals);
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

const HostTree::Branch& HostController::branch_of(Rank leader) const {
  return *std::ranges::find(setup_.tree.children, leader, &HostTree::Branch::leader);
}

Failure HostController::broke_protocol(Rank rank, const Error& error) {
  return {error.code(),
          "rank " + std::to_string(rank) + " broke the control protocol: " + error.what()};
}

Failure HostController::host_is_gone(Rank leader, const std::string& how) const {
  return {ErrorCode::kPeer, "the connection to " + rank_on_host(leader) +
                                ", which forwards the reports of " +
                                text_of_ranks(branch_of(leader).ranks) + ", " + how};
}

// ---- RootController

RootController::RootController(Coordinator::Settings settings, Setup setup)
    : HostController(std::move(setup)), coordinator_(std::move(settings)) {
  for (const HostTree::Branch& child : setup_.tree.children) {
    groups_[child.leader] = coordinator_.add_group(child.ranks);
  }
}

bool RootController::step() {
  const int64_t now = now_ns();
  bool moved = setup_.channel.drain(
      [&](Rank from, ByteView message) {
        receive(from, message,
                [&](const Report& report) { coordinator_.receive(from, report, now); });
      },
      [this](Rank from, const Error& error) {
        coordinator_.lose(from, broke_protocol(from, error));
      });
  if (setup_.hosts) {
    moved |= setup_.hosts->drain([this](Rank child, ByteView message) { hear(child, message); },
                                 [this](Rank child, const std::string& how) {
                                   coordinator_.lose(child, host_is_gone(child, how));
                                 });
  }
  for (auto& [rank, failure] : take_lost()) {
    coordinator_.lose(rank, std::move(failure));
    moved = true;
  }
  if (now >= coordinator_.next_tick()) {
    coordinator_.tick(now);
    moved = true;
  }
  if (!moved) return false;
  publish_all();
  notices_ = coordinator_.take_notices();
  coordinator_.take_late_ranks(late_);
  return true;
}

void RootController::publish_all() {
  coordinator_.publish(entries_);
  for (Entry& entry : entries_) {
    const bool goes_on = prepare(entry);
    if (auto* abort = std::get_if<Abort>(&entry)) log(LogLevel::kError, abort->failure.text);
    if (auto* where = std::get_if<CollectStacks>(&entry)) {
      answer_for_stopped(where->ranks, [this](Rank rank, const StackReport& answer) {
        coordinator_.receive(rank, answer, now_ns());
      });
    }
    encoded_.clear();
    encode(entry, encoded_);
    publish(encoded_);
    if (!goes_on) break;  // the job has failed
  }
  entries_.clear();
  send_down();
}

// Decodes a report. If the report is invalid, ends the job with an error that names the rank.
template <class Receive>
void RootController::receive(Rank from, ByteView message, Receive&& receive) {
  try {
    receive(decode_report(message));
  } catch (const Error& error) {
    coordinator_.lose(from, broke_protocol(from, error));
  }
}

void RootController::hear(Rank child, ByteView message) {
  auto check_request = [&](const std::vector<Rank>& ranks, ByteView bytes) {
    receive(ranks.empty() ? child : ranks.front(), bytes, [&](const Report& report) {
      if (ranks.empty()) return coordinator_.receive_all(groups_.at(child), report, now_ns());
      for (Rank rank : ranks) coordinator_.receive(rank, report, now_ns());
    });
  };
  try {
    for_each_record(message, branch_of(child).ranks, check_request);
  } catch (const Error& error) {
    coordinator_.lose(child, broke_protocol(child, error));
  }
}

// Shares the memory that the entry needs. If memory is short, replaces an OpenSet with a Fail. For a pair, however,
// calls follow the OpenSet at once. The OpenSet of a pair is therefore replaced with an Abort, which ends the job, and
// the function returns false.
bool RootController::prepare(Entry& entry) {
  try {
    share_memory(entry);
  } catch (const Error& error) {
    const auto* open = std::get_if<OpenSet>(&entry);
    if (!open) throw;
    if (is_pair(open->set)) {
      coordinator_.stop_deciding();
      entry = Abort{{error.code(), error.what()}};
      return false;
    }
    coordinator_.withdraw_set(open->set);
    entry = Fail{CallKey(open->key), {error.code(), error.what()}};
  }
  return true;
}

// ---- HostRelay

HostRelay::HostRelay(Setup setup)
    : HostController(std::move(setup)),
      aggregator_(setup_.topology.size, ranks_below(setup_.topology, setup_.tree),
                  setup_.tree.parent != 0) {}

bool HostRelay::step() {
  const int64_t now = now_ns();
  const auto lose = [this](Rank from, const Error& error) {
    report(from, Lost{broke_protocol(from, error)});
  };
  bool moved = setup_.channel.drain(
      [&](Rank from, ByteView message) {
        try {
          aggregator_.receive(from, message, now);
        } catch (const Error& error) {
          lose(from, error);
        }
      },
      lose);
  // Handles deaths before links, because a death on this host may be the reason why the host above has ended.
  for (auto& [rank, failure] : take_lost()) {
    if (!lost_) lost_ = failure;
    report(rank, Lost{std::move(failure)});
    moved = true;
  }
  moved |= setup_.hosts->drain([this](Rank peer, ByteView message) { hear(peer, message); },
                               [this](Rank peer, const std::string& how) { lose_host(peer, how); });
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
  if (peer == setup_.tree.parent) return read_log(message);
  const std::vector<Rank>& below = branch_of(peer).ranks;
  try {
    for_each_record(message, below, [&](const std::vector<Rank>& ranks, ByteView bytes) {
      aggregator_.receive(ranks, below, bytes, now_ns());
    });
  } catch (const Error& error) {
    report(peer, Lost{broke_protocol(peer, error)});
  }
}

void HostRelay::read_log(ByteView entries) {
  Decoder in(entries);
  while (!in.empty() && !over_) {
    ByteView bytes = in.get_bytes();
    const Entry entry = decode_entry(bytes);
    aggregator_.read(entry);
    try {
      read(entry);
    } catch (const Error& error) {  // no memory for a set, so this host and those below fail
      const Failure why{error.code(), rank_on_host(setup_.topology.rank) + ": " + error.what()};
      log(LogLevel::kError, why.text);
      abort_below(why);
      return report(setup_.topology.rank, Lost{why});
    }
    publish(bytes);
  }
}

void HostRelay::read(const Entry& entry) {
  over_ = over_ || std::holds_alternative<Abort>(entry) || std::holds_alternative<Stop>(entry);
  share_memory(entry);
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

// Reports that a host below was lost. If the host above was lost, aborts the hosts below. If a rank of this host has
// died earlier, its death is the cause: rank 0 has ended the job because of it, and rank 0's Abort may have been lost
// with the connection.
void HostRelay::lose_host(Rank peer, const std::string& how) {
  if (over_) return;
  const Rank above = setup_.tree.parent;
  if (peer != above) return report(peer, Lost{host_is_gone(peer, how)});
  Failure why{ErrorCode::kPeer, "the connection to " + rank_on_host(above) + ", which links " +
                                    rank_on_host(setup_.topology.rank) + " to the other hosts, " +
                                    how};
  if (lost_) why = lost_;
  log(LogLevel::kError, why.text);
  abort_below(why);
  // Informs the hosts above, if the connection to them still works in this direction.
  report(setup_.topology.rank, Lost{std::move(why)});
}

void HostRelay::abort_below(const Failure& why) {
  over_ = true;
  encoded_.clear();
  encode(Entry(Abort{why}), encoded_);
  publish(encoded_);
}

// Informs the hosts below, because this leader will not pass on an Abort of rank 0.
void HostRelay::leave(const Failure& why) {
  if (over_) return;
  abort_below({ErrorCode::kPeer, why.code == ErrorCode::kPeer
                                     ? why.text
                                     : rank_on_host(setup_.topology.rank) + " left: " + why.text});
  send_down();
}

}  // namespace farandole
