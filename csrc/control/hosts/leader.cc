// SPDX-License-Identifier: Apache-2.0
#include "control/hosts/leader.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "control/hosts/aggregator.h"

namespace farandole {

Leader::Leader(Coordinator::Settings settings, Setup setup, OnStall on_stall, OnLate on_late)
    : HostLeader(std::move(setup)),
      coordinator_(settings),
      on_stall_(std::move(on_stall)),
      on_late_(std::move(on_late)) {
  for (const HostTree::Branch& child : setup_.tree.children) {
    groups_[child.leader] = coordinator_.add_group(child.ranks);
  }
}

bool Leader::step() {
  const int64_t now = now_ns();
  bool moved = setup_.channel->drain([this, now](Rank from, ByteView message) {
    receive(from, message, [&](const Report& report) { coordinator_.receive(from, report, now); });
  });
  if (setup_.hosts) {
    moved |= setup_.hosts->drain([this](Rank child, ByteView message) { hear(child, message); });
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
  for (const std::string& notice : coordinator_.take_notices()) {
    log(LogLevel::kWarning, notice);
    on_stall_(notice);
  }
  coordinator_.take_late_ranks(late_);
  for (const auto& late : late_) on_late_(late.rank, late.after_ns);
  return true;
}

void Leader::publish_all() {
  coordinator_.publish(entries_);
  for (Entry& entry : entries_) {
    if (auto* abort = std::get_if<Abort>(&entry)) log(LogLevel::kError, abort->failure.text);
    if (auto* where = std::get_if<WhereAre>(&entry)) answer_for_standing(*where);
    encoded_.clear();
    prepare(entry);
    encode(entry, encoded_);
    publish(encoded_);
  }
  entries_.clear();
  send_down();
}

// What a rank could not have sent ends the job, in its name.
template <class Receive>
void Leader::receive(Rank from, ByteView message, Receive&& receive) {
  try {
    receive(decode_report(message));
  } catch (const Error& error) {
    lose_for(from, error);
  }
}

void Leader::lose_for(Rank rank, const Error& error) {
  coordinator_.lose(rank, {error.code(), "rank " + std::to_string(rank) +
                                             " broke the control protocol: " + error.what()});
}

void Leader::hear(Rank child, ByteView message) {
  const auto& children = setup_.tree.children;
  auto branch = std::ranges::find(children, child, &HostTree::Branch::leader);
  if (message.empty()) return coordinator_.lose(child, host_is_gone(*branch));
  auto take_in = [&](const std::vector<Rank>& ranks, ByteView bytes) {
    receive(ranks.empty() ? child : ranks.front(), bytes, [&](const Report& report) {
      if (ranks.empty()) return coordinator_.receive_all(groups_.at(child), report, now_ns());
      for (Rank rank : ranks) coordinator_.receive(rank, report, now_ns());
    });
  };
  try {
    for_each_record(message, branch->ranks, take_in);
  } catch (const Error& error) {
    lose_for(child, error);
  }
}

// A rank that stands still can't answer itself.
void Leader::answer_for_standing(const WhereAre& where) {
  for (Rank rank : where.ranks) {
    if (!std::ranges::binary_search(setup_.topology.local, rank)) continue;
    std::string why = setup_.standing(rank);
    if (!why.empty()) coordinator_.receive(rank, Whereabouts{true, std::move(why)}, now_ns());
  }
}

// Memory that the entry needs, ahead of it; without memory, it says so.
void Leader::prepare(Entry& entry) {
  if (auto* gpu = std::get_if<OpenGpu>(&entry); gpu && !gpu->nccl) {
    share_staging(gpu->set, gpu->ranks);
  }
  auto* open = std::get_if<OpenSet>(&entry);
  if (!open) return;
  try {
    share_staging(open->set, open->ranks);
  } catch (const Error& error) {
    coordinator_.withdraw_set(open->set);
    entry = Fail{CallKey(open->key), {error.code(), error.what()}};
  }
}

}  // namespace farandole
