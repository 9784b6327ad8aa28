// SPDX-License-Identifier: Apache-2.0
#include "control/hosts/aggregator.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/error.h"

namespace farandole {
namespace {

constexpr size_t kRemembered = 1 << 14;  // twice the number of ids in use

// The same bytes from every rank: an input, and nothing that differs.
bool uniform(const Ready& ready) {
  const Contribution& given = ready.contribution;
  return ready.id != 0 && given.has_input && !given.has_payload && given.rows == 0 &&
         given.splits.empty();
}

// Whether a report's meaning is independent of the rank's earlier reports.
bool free_of_order(const Report& report) {
  return std::holds_alternative<Ready>(report) || std::holds_alternative<Done>(report) ||
         std::holds_alternative<Post>(report) || std::holds_alternative<StackReport>(report) ||
         std::holds_alternative<Inquire>(report);
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
  read(OpenSet{kWorldSet, numbers_below(size), {}});
}

// Marks as gone. Ids are reused, prediction numbers are not: only the last of those are kept.
void Aggregator::take_back(KnownById& table, uint32_t id) {
  if (auto found = table.find(id); found != table.end()) found->second.gone = true;
  while (table.size() > kRemembered && table.begin()->second.gone) table.erase(table.begin());
}

void Aggregator::receive(const std::vector<Rank>& ranks, const std::vector<Rank>& child,
                         ByteView bytes, int64_t now_ns) {
  const Report report = decode_report(bytes);
  if (std::holds_alternative<Expedite>(report)) {
    expedite_told_ = expedite_told_ && !expediting_.empty();
    expediting_.insert(ranks.begin(), ranks.end());
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
    look_up(predictions_, all->prediction);
    key = {Kind::kPrediction, all->prediction, 0};
  }
  std::vector<Rank> who = ranks;
  if (ranks.empty()) {  // all members below that child
    if (!set) throw Error(ErrorCode::kInternal, "a host reports for all what is not known here");
    std::ranges::set_intersection(child, set->ranks, std::back_inserter(who));
  }
  if (says_ready(report)) {
    for (Rank rank : who) expediting_.erase(rank);
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
  expedite_told_ = expedite_told_ && !says_ready(report);
  record(who, bytes);
}

// Holds a report until all members below have reported it, in whatever way.
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
  expedite_told_ = false;
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

// Comes after the ranks' Ready reports, because a Ready tells the host above that its rank no longer waits.
void Aggregator::tell_expedite() {
  if (!gathers_above_ || expediting_.empty() || std::exchange(expedite_told_, true)) return;
  ByteString expedite;
  encode(Report(Expedite{}), expedite);
  record({expediting_.begin(), expediting_.end()}, expedite);
}

ByteString Aggregator::take(int64_t now_ns) {
  tell_expedite();
  if (out_.empty() || (!expedites() && now_ns < sent_ns_ + gather_ns_)) return {};
  const bool burst = !expedites() && now_ns < sent_ns_ + 2 * kLongestGatherNs;
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
  if (auto* prediction = std::get_if<Predict>(&entry))
    predictions_[prediction->id] = {prediction->set};
  // Late reports of a closed set or a dissolved prediction are forwarded at once.
  if (auto* close = std::get_if<CloseSet>(&entry)) sets_.at(close->set).straight = true;
  if (auto* dissolve = std::get_if<Dissolve>(&entry)) take_back(predictions_, dissolve->id);
  if (auto* joined = std::get_if<Joined>(&entry); joined && sets_.contains(joined->set)) {
    sets_.at(joined->set).straight = false;
  }
  bool gone = std::holds_alternative<CloseSet>(entry) || std::holds_alternative<Dissolve>(entry);
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
  if (!out_.empty()) next = expedites() ? 0 : sent_ns_ + gather_ns_;
  for (auto& [key, pending] : pending_) next = std::min(next, pending.since_ns + kPatienceNs);
  return next;
}

}  // namespace farandole
