// SPDX-License-Identifier: Apache-2.0
#include "control/hosts/root_controller.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/logging.h"
#include "control/hosts/aggregator.h"

namespace farandole {

RootController::RootController(Coordinator::Settings settings, Setup setup, OnStall on_stall,
                               OnLate on_late)
    : HostController(std::move(setup)),
      coordinator_(settings),
      on_stall_(std::move(on_stall)),
      on_late_(std::move(on_late)) {
  for (const HostTree::Branch& child : setup_.tree.children) {
    groups_[child.leader] = coordinator_.add_group(child.ranks);
  }
}

bool RootController::step() {
  const int64_t now = now_ns();
  bool moved = setup_.channel.drain([this, now](Rank from, ByteView message) {
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

void RootController::publish_all() {
  coordinator_.publish(entries_);
  for (Entry& entry : entries_) {
    if (auto* abort = std::get_if<Abort>(&entry)) log(LogLevel::kError, abort->failure.text);
    if (auto* where = std::get_if<CollectStacks>(&entry)) {
      answer_for_stopped(where->ranks, [this](Rank rank, const StackReport& answer) {
        coordinator_.receive(rank, answer, now_ns());
      });
    }
    encoded_.clear();
    prepare(entry);
    encode(entry, encoded_);
    publish(encoded_);
  }
  entries_.clear();
  send_down();
}

// An invalid report ends the job with an error that names its rank.
template <class Receive>
void RootController::receive(Rank from, ByteView message, Receive&& receive) {
  try {
    receive(decode_report(message));
  } catch (const Error& error) {
    coordinator_.lose(from, broke_protocol(from, error));
  }
}

void RootController::hear(Rank child, ByteView message) {
  const auto& children = setup_.tree.children;
  auto branch = std::ranges::find(children, child, &HostTree::Branch::leader);
  if (message.empty()) return coordinator_.lose(child, host_is_gone(*branch));
  auto check_request = [&](const std::vector<Rank>& ranks, ByteView bytes) {
    receive(ranks.empty() ? child : ranks.front(), bytes, [&](const Report& report) {
      if (ranks.empty()) return coordinator_.receive_all(groups_.at(child), report, now_ns());
      for (Rank rank : ranks) coordinator_.receive(rank, report, now_ns());
    });
  };
  try {
    for_each_record(message, branch->ranks, check_request);
  } catch (const Error& error) {
    coordinator_.lose(child, broke_protocol(child, error));
  }
}

// Shares the memory that the entry needs; without memory, turns the entry into a failure.
void RootController::prepare(Entry& entry) {
  if (auto* gpu = std::get_if<SetUp>(&entry); gpu && gpu->backend == BackendKind::kStaged) {
    share_staging(gpu->set, gpu->ranks);
  }
  auto* open = std::get_if<OpenSet>(&entry);
  if (!open) return;
  try {
    share_staging(open->set, open->ranks);
  } catch (const Error& error) {
    // Calls of a pair follow its opening at once.
    if (is_pair(open->set)) return void(entry = Abort{{error.code(), error.what()}});
    coordinator_.withdraw_set(open->set);
    entry = Fail{CallKey(open->key), {error.code(), error.what()}};
  }
}

}  // namespace farandole
