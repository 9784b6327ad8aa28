// SPDX-License-Identifier: Apache-2.0
#include "core/leader.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/log.h"

namespace farandole {

Leader::Leader(Coordinator::Settings settings, std::unique_ptr<LeaderChannel> channel,
               HostLinks& links, const Topology& topology, StagingBytes staging_bytes,
               Standing standing, OnStall on_stall)
    : coordinator_(settings),
      channel_(std::move(channel)),
      links_(links),
      topology_(topology),
      staging_bytes_(std::move(staging_bytes)),
      standing_(std::move(standing)),
      on_stall_(std::move(on_stall)) {}

bool Leader::step() {
  bool moved = channel_->drain([this](Rank from, ByteView message) { receive(from, message); });
  if (has_lost_) {
    take_lost();
    moved = true;
  }
  int64_t now = now_ns();
  if (now >= coordinator_.next_tick()) {
    coordinator_.tick(now);
    moved = true;
  }
  if (!moved) return false;
  coordinator_.publish(entries_);
  for (Entry& entry : entries_) {
    if (auto* abort = std::get_if<Abort>(&entry)) log(LogLevel::kError, abort->failure.text);
    if (auto* where = std::get_if<WhereAre>(&entry)) answer_for_standing(*where);
    encoded_.clear();
    encode(prepare(std::move(entry)), encoded_);
    channel_->publish(encoded_);
  }
  entries_.clear();
  channel_->ring_members();
  for (const std::string& notice : coordinator_.take_notices()) {
    log(LogLevel::kWarning, notice);
    on_stall_(notice);
  }
  return true;
}

void Leader::receive(Rank from, ByteView message) {
  try {
    coordinator_.receive(from, decode_report(message), now_ns());
  } catch (const Error& error) {
    coordinator_.lose(from, {error.code(), "rank " + std::to_string(from) +
                                               " broke the control protocol: " + error.what()});
  }
}

// A rank that stands still can't answer itself.
void Leader::answer_for_standing(const WhereAre& where) {
  for (Rank rank : where.ranks) {
    std::string why = standing_(rank);
    if (!why.empty()) coordinator_.receive(rank, Whereabouts{true, std::move(why)}, now_ns());
  }
}

// Memory travels ahead of the entry that needs it, so that nobody who reads the entry has to wait.
Entry Leader::prepare(Entry entry) {
  auto* open = std::get_if<OpenSet>(&entry);
  if (!open) return entry;
  std::vector<int> locals;
  for (Rank rank : open->ranks) {
    auto at = std::lower_bound(topology_.local.begin(), topology_.local.end(), rank);
    locals.push_back(static_cast<int>(at - topology_.local.begin()));
  }
  try {
    size_t bytes = staging_bytes_(static_cast<int>(open->ranks.size()));
    Segment segment = links_.give("farandole-staging", bytes, locals);
    if (locals.front() == topology_.local_rank) staging_[open->set] = std::move(segment);
    return entry;
  } catch (const Error& error) {
    coordinator_.withdraw_set(open->set);
    return Fail{open->key, {error.code(), error.what()}};
  }
}

Segment Leader::take_staging(SetId set) {
  auto node = staging_.extract(set);
  return node ? std::move(node.mapped()) : Segment{};
}

void Leader::lose(Rank rank, Failure failure) {
  std::lock_guard lock(lost_mutex_);
  lost_.emplace_back(rank, std::move(failure));
  has_lost_ = true;
}

void Leader::take_lost() {
  std::lock_guard lock(lost_mutex_);
  has_lost_ = false;
  for (auto& [rank, failure] : lost_) coordinator_.lose(rank, std::move(failure));
  lost_.clear();
}

}  // namespace farandole
