// SPDX-License-Identifier: Apache-2.0
#include "control/hosts/aggregator.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "base/error.h"

namespace farandole {
namespace {

constexpr size_t kRemembered = 1 << 14;  // twice the ids alive at once

// The same bytes from every rank: input, and nothing that differs.
bool uniform(const Ready& ready) {
  const Contribution& given = ready.contribution;
  return ready.id != 0 && given.has_input && !given.has_payload && given.rows == 0 &&
         given.splits.empty();
}

// Its meaning does not depend on what the rank has reported before.
bool free_of_order(const Report& report) {
  return std::holds_alternative<Ready>(report) || std::holds_alternative<Done>(report) ||
         std::holds_alternative<Whereabouts>(report) || std::holds_alternative<Inquire>(report);
}

}  // namespace

void for_each_record(ByteView message, const std::vector<Rank>& below, const RecordVisitor& visit) {
  Decoder in(message);
  for (auto records = in.get_count(8); records > 0; --records) {
    auto ranks = in.get_vector<Rank>();
    for (Rank rank : ranks) {
      if (std::ranges::binary_search(below, rank)) continue;
      throw Error(ErrorCode::kInternal,
                  "a host speaks for rank " + std::to_string(rank) + ", which is not its own");
    }
    visit(ranks, in.get_bytes());
  }
  in.finish();
}

Aggregator::Aggregator(int size, std::vector<Rank> below, bool gathers_above)
    : below_(std::move(below)), gathers_above_(gathers_above) {
  std::vector<Rank> world(static_cast<size_t>(size));
  std::iota(world.begin(), world.end(), 0);
  read(OpenSet{kWorldSet, std::move(world), {}});
}

// Ids are used again, numbers of bundles are not: of these the last are kept.
void Aggregator::take_back(KnownById& table, uint32_t id) {
  if (auto found = table.find(id); found != table.end()) found->second.gone = true;
  while (table.size() > kRemembered && table.begin()->second.gone) table.erase(table.begin());
}

void Aggregator::receive(const std::vector<Rank>& ranks, const std::vector<Rank>& child,
                         ByteView bytes, int64_t now_ns) {
  const Report report = decode_report(bytes);
  if (std::holds_alternative<Hurry>(report)) {
    haste_told_ = haste_told_ && !hurrying_.empty();
    hurrying_.insert(ranks.begin(), ranks.end());
    return;
  }
  const SetBelow* set = nullptr;
  Key key{};
  bool plain = true;
  bool gone = false;
  auto look_up = [&](const KnownById& table, uint32_t id) {
    auto known = table.find(id);
    if (known == table.end()) return;
    set = &sets_.at(known->second.set);
    gone = known->second.gone;
  };
  if (auto* ready = std::get_if<Ready>(&report)) {
    look_up(ids_, ready->id);
    key = {Kind::kCall, ready->id, ready->sequence};
    plain = uniform(*ready);
  } else if (auto* all = std::get_if<ReadyAll>(&report)) {
    look_up(bundles_, all->bundle);
    key = {Kind::kBundle, all->bundle, 0};
  }
  std::vector<Rank> who = ranks;
  if (ranks.empty()) {  // all members below that child
    if (!set) throw Error(ErrorCode::kInternal, "a host reports for all what is not known here");
    std::ranges::set_intersection(child, set->ranks, std::back_inserter(who));
  }
  if (says_ready(report)) {
    for (Rank rank : who) hurrying_.erase(rank);
  } else {
    urgent_ = true;
  }
  if (set && !gone && !set->straight && !leaving_)
    return hold(key, *set, who, plain, bytes, now_ns);
  if (!free_of_order(report)) release_all();
  if (auto* join = std::get_if<Join>(&report); join && sets_.contains(join->set)) {
    sets_.at(join->set).straight = true;
  }
  leaving_ = leaving_ || std::holds_alternative<Leave>(report);
  haste_told_ = haste_told_ && !says_ready(report);
  record(who, bytes);
}

// Until all members below have reported it, in whatever way.
void Aggregator::hold(const Key& key, const SetBelow& set, const std::vector<Rank>& ranks,
                      bool plain, ByteView report, int64_t now_ns) {
  Pending& pending = pending_[key];
  if (pending.heard == 0) pending.since_ns = now_ns;
  pending.heard += static_cast<int>(ranks.size());
  if (plain) {
    pending.plain.insert(pending.plain.end(), ranks.begin(), ranks.end());
    pending.report.assign(report.begin(), report.end());
  } else {
    pending.others.emplace_back(ranks, ByteString(report.begin(), report.end()));
  }
  if (std::cmp_less(pending.heard, set.ranks.size())) return;
  release(pending, &set);
  pending_.erase(key);
}

void Aggregator::release(const Pending& pending, const SetBelow* whole) {
  haste_told_ = false;
  for (const auto& [ranks, report] : pending.others) record(ranks, report);
  if (pending.plain.empty()) return;
  bool all = whole && pending.plain.size() == whole->ranks.size();
  record(all ? std::vector<Rank>{} : pending.plain, pending.report);
}

void Aggregator::release_all() {
  for (auto& [key, pending] : std::exchange(pending_, {})) release(pending, nullptr);
}

void Aggregator::record(const std::vector<Rank>& ranks, ByteView report) {
  if (out_.empty()) Encoder(out_).put(uint32_t{0});
  uint32_t records;
  std::memcpy(&records, out_.data(), sizeof records);
  ++records;
  std::memcpy(out_.data(), &records, sizeof records);
  Encoder out(out_);
  out.put(ranks);
  out.put_bytes(report);
}

// After what they are ready for: the host above takes a rank that says so for one that does not wait.
void Aggregator::tell_haste() {
  if (!gathers_above_ || hurrying_.empty() || std::exchange(haste_told_, true)) return;
  ByteString hurry;
  encode(Report(Hurry{}), hurry);
  record({hurrying_.begin(), hurrying_.end()}, hurry);
}

ByteString Aggregator::take(int64_t now_ns) {
  tell_haste();
  if (out_.empty() || (!in_haste() && now_ns < sent_ns_ + gather_ns_)) return {};
  const bool burst = !in_haste() && now_ns < sent_ns_ + 2 * kLongestGatherNs;
  gather_ns_ = burst ? std::min(2 * gather_ns_, kLongestGatherNs) : kShortestGatherNs;
  sent_ns_ = now_ns;
  urgent_ = false;
  return std::exchange(out_, {});
}

void Aggregator::read(const Entry& entry) {
  if (auto* define = std::get_if<Define>(&entry)) ids_[define->id] = {define->request.set};
  if (auto* forget = std::get_if<Forget>(&entry)) take_back(ids_, forget->id);
  if (auto* open = std::get_if<OpenSet>(&entry)) {
    std::ranges::set_intersection(open->ranks, below_, std::back_inserter(sets_[open->set].ranks));
  }
  if (auto* bundle = std::get_if<Bundle>(&entry)) bundles_[bundle->id] = {bundle->set};
  // Late reports about what is gone go straight.
  if (auto* close = std::get_if<CloseSet>(&entry)) sets_.at(close->set).straight = true;
  if (auto* unbundle = std::get_if<Unbundle>(&entry)) take_back(bundles_, unbundle->id);
  if (auto* joined = std::get_if<Joined>(&entry); joined && sets_.contains(joined->set)) {
    sets_.at(joined->set).straight = false;
  }
  bool gone = std::holds_alternative<CloseSet>(entry) || std::holds_alternative<Unbundle>(entry);
  if (gone) release_all();
}

void Aggregator::tick(int64_t now_ns) {
  std::erase_if(pending_, [&](const auto& entry) {
    if (now_ns < entry.second.since_ns + kPatienceNs) return false;
    release(entry.second, nullptr);
    return true;
  });
}

int64_t Aggregator::next_tick() const {
  int64_t next = std::numeric_limits<int64_t>::max();
  if (!out_.empty()) next = in_haste() ? 0 : sent_ns_ + gather_ns_;
  for (auto& [key, pending] : pending_) next = std::min(next, pending.since_ns + kPatienceNs);
  return next;
}

}  // namespace farandole
