// SPDX-License-Identifier: Apache-2.0
#include "control/hosts/aggregator.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/error.h"

namespace farandole {
namespace {

// True if the meaning of this report does not depend on earlier reports of the rank.
bool free_of_order(const Report& report) {
  return says_ready(report) || std::holds_alternative<Done>(report) ||
         std::holds_alternative<Post>(report) || std::holds_alternative<StackReport>(report) ||
         std::holds_alternative<Inquire>(report) || std::holds_alternative<Stuck>(report);
}

}  // namespace

void for_each_record(ByteView message, const std::vector<Rank>& below, const RecordVisitor& visit) {
  Decoder in(message);
  for (auto records = in.get_count(8); records > 0; --records) {
    auto ranks = in.get_vector<Rank>();
    for (Rank rank : ranks) {
      if (std::ranges::binary_search(below, rank)) continue;
      throw Error(ErrorCode::kInternal, "a host sent a report of rank " + std::to_string(rank) +
                                            ", which is not in its branch of the host tree");
    }
    visit(ranks, in.get_bytes());
  }
  in.finish();
}

Aggregator::Aggregator(int size, std::vector<Rank> below, bool gathers_above)
    : below_(std::move(below)), gathers_above_(gathers_above) {
  read(OpenSet{kWorldSet, numbers_below(size), {}});
}

void Aggregator::receive(const std::vector<Rank>& ranks, const std::vector<Rank>& child,
                         ByteView bytes, int64_t now_ns) {
  const Report report = decode_report(bytes);
  if (std::holds_alternative<Expedite>(report)) {
    expedite_sent_ = expedite_sent_ && !expediting_.empty();
    expediting_.insert(ranks.begin(), ranks.end());
    return;
  }
  Sender sender{ranks, child};
  if (const auto* many = std::get_if<ReadyMany>(&report)) {
    receive_many(*many, sender, now_ns);
  } else {
    receive_one(report, bytes, sender, now_ns);
  }
}

// Handles each id separately, so that reports of a call are merged even if ranks batch their calls differently.
void Aggregator::receive_many(const ReadyMany& many, Sender& sender, int64_t now_ns) {
  many.ids.for_each([&](uint32_t id) {
    const KnownCall* call = known(id);
    const std::vector<Rank>& who = members_of(sender, call);
    stop_expediting(who);
    const Key key{call ? call->set : kWorldSet, id, 0};
    if (!call || passes(call, key)) return record_ready(who, id);
    Held& held = hear(key, who, now_ns);
    held.plain.insert(held.plain.end(), who.begin(), who.end());
    release_if_whole(key, held);
  });
}

void Aggregator::receive_one(const Report& report, ByteView bytes, Sender& sender, int64_t now_ns) {
  const auto* question = std::get_if<Inquire>(&report);
  const bool sign_of_life = question && question->number == 0;
  if (sign_of_life && std::exchange(asked_, true)) return;  // one answer is for all ranks
  const auto* ready = std::get_if<Ready>(&report);
  const KnownCall* call = ready ? known(ready->id) : nullptr;
  const std::vector<Rank>& who = members_of(sender, call);
  if (ready) {
    stop_expediting(who);
  } else {
    urgent_ = true;
  }
  const std::optional<Key> key = key_of(report, call);
  if (key && !passes(call, *key)) {
    Held& held = hear(*key, who, now_ns);
    const bool first = held.report.empty();
    if (ready->plain() && (first || std::ranges::equal(held.report, bytes))) {
      held.plain.insert(held.plain.end(), who.begin(), who.end());
      held.report.assign(bytes.begin(), bytes.end());
    } else {
      held.others.emplace_back(who, ByteString(bytes.begin(), bytes.end()));
    }
    return release_if_whole(*key, held);
  }
  if (!free_of_order(report)) release_all();
  if (auto* join = std::get_if<Join>(&report); join && sets_.contains(join->set)) {
    sets_.at(join->set).straight = true;
  }
  leaving_ = leaving_ || std::holds_alternative<Leave>(report);
  expedite_sent_ = expedite_sent_ && !ready;
  record(who, bytes);
}

// Returns null if the call has no id, or if this host has not yet read the Define of the id.
const Aggregator::KnownCall* Aggregator::known(uint32_t id) const {
  auto found = ids_.find(id);
  return found == ids_.end() ? nullptr : &found->second;
}

// Returns the ranks that report this call.
const std::vector<Rank>& Aggregator::members_of(Sender& sender, const KnownCall* call) {
  const SetBelow* set = call ? &sets_.at(call->set) : nullptr;
  if (sender.ranks.empty() && !set) {
    throw Error(ErrorCode::kInternal,
                "a host sent one report for all its ranks, but of an unknown call");
  }
  const std::vector<Rank>& who = sender.ranks.empty() ? sender.members : sender.ranks;
  if (sender.ranks.empty() && sender.set != set) {
    sender.members.clear();
    std::ranges::set_intersection(sender.child, set->ranks, std::back_inserter(sender.members));
    sender.set = set;
  }
  return who;
}

// Returns nullopt if the report is not about a single call, or if its call has a name but no id.
std::optional<Aggregator::Key> Aggregator::key_of(const Report& report,
                                                  const KnownCall* call) const {
  const auto* ready = std::get_if<Ready>(&report);
  const auto* refuse = std::get_if<Refuse>(&report);
  if (ready && call) return Key{call->set, call->named() ? ready->id : 0, ready->sequence};
  if (ready && ready->id == 0)
    return find_key({ready->request.set, ready->request.name, ready->sequence});
  return refuse ? find_key(refuse->key) : std::nullopt;
}

std::optional<Aggregator::Key> Aggregator::find_key(const CallKey& key) const {
  if (!sets_.contains(key.set)) return std::nullopt;
  if (!key.named()) return Key{key.set, 0, key.sequence};
  const auto id = names_.find({key.set, key.name});
  return id == names_.end() ? std::nullopt : std::optional(Key{key.set, id->second, 0});
}

// Call this for ranks that have made a new call, because their users no longer wait.
void Aggregator::stop_expediting(const std::vector<Rank>& ranks) {
  if (expediting_.empty()) return;
  for (Rank rank : ranks) expediting_.erase(rank);
}

// True if the report goes up at once. In this case, no report of the same call may wait for it, even if that report
// could wait by itself: some ranks may report a call before its Define and others after it, or some before a failure
// and others after it.
bool Aggregator::passes(const KnownCall* call, const Key& key) {
  if (early_.contains(key)) return true;
  if (call && !leaving_ && !sets_.at(call->set).straight) return false;
  release_early(key);
  return true;
}

void Aggregator::read_end(const Entry& entry) {
  if (auto* fail = std::get_if<Fail>(&entry)) {
    const auto key = fail->key.posted() ? std::nullopt : find_key(fail->key);
    if (key) release_early(*key);
  } else if (auto* result = std::get_if<Result>(&entry)) {
    end(result->set, result->id, result->sequence);
  } else if (auto* run = std::get_if<Run>(&entry); run && !early_.empty()) {
    for (const Item& item : run->items) end(run->set, item.id, item.sequence);
    run->plain.for_each([&](uint32_t id) { early_.erase({run->set, id, 0}); });
  }
}

// Call this when all ranks have made this call, and thus all unnamed calls before it. Later reports mean later calls.
void Aggregator::end(SetId set, uint32_t id, uint64_t sequence) {
  if (ids_.at(id).named()) {
    early_.erase({set, id, 0});
  } else {
    early_.erase(early_.lower_bound({set, 0, 0}), early_.upper_bound({set, 0, sequence}));
  }
}

void Aggregator::read_define(const Define& define) {
  const Request& request = define.request;
  KnownCall& call = ids_[define.id];
  early_.erase(Key{call.set, define.id, 0});
  call = {request.set, request.name};
  if (call.named()) names_[{call.set, call.name}] = define.id;
}

// Ranks that have read the Forget report the call without its id, so no report with the id may wait for their reports.
void Aggregator::read_forget(uint32_t id) {
  const KnownCall& call = ids_.at(id);
  if (const auto name = names_.find({call.set, call.name}); name != names_.end()) {
    if (name->second == id) names_.erase(name);
  }
  release_early(Key{call.set, id, 0});
}

Aggregator::Held& Aggregator::hear(const Key& key, const std::vector<Rank>& ranks, int64_t now_ns) {
  Held& held = held_[key];
  if (held.heard == 0) held.since_ns = now_ns;
  held.heard += static_cast<int>(ranks.size());
  return held;
}

// Releases the reports of a call if all members below have reported the call, in any form.
void Aggregator::release_if_whole(const Key& key, const Held& held) {
  const SetBelow& whole = sets_.at(key.set);
  if (std::cmp_less(held.heard, whole.ranks.size())) return;
  release(key, held, &whole);
  held_.erase(key);
}

void Aggregator::release(const Key& key, const Held& held, const SetBelow* whole) {
  expedite_sent_ = false;
  for (const auto& [ranks, report] : held.others) record(ranks, report);
  if (held.plain.empty()) return;
  std::vector<Rank> ranks = held.plain;
  if (whole && ranks.size() == whole->ranks.size()) ranks.clear();
  if (!held.report.empty()) return record(ranks, held.report);
  std::ranges::sort(ranks);
  record_ready(ranks, key.id);
}

// Sends the reports of a call up, although members below may not have reported it. Later reports then go up at once.
void Aggregator::release_early(Key key) {
  if (const auto held = held_.extract(key)) release(key, held.mapped(), nullptr);
  early_.insert(key);
}

void Aggregator::release_all() {
  while (!held_.empty()) release_early(held_.begin()->first);
}

// Records that a call is ready. The order of such records may change, but not relative to other records.
void Aggregator::record_ready(const std::vector<Rank>& ranks, uint32_t id) {
  expedite_sent_ = false;
  IdRuns& ids = ready_[ranks];
  ids.add(id);
  if (ids.full()) write_ready();
}

void Aggregator::write_ready() {
  for (auto& [ranks, ids] : std::exchange(ready_, {})) {
    ByteString report;
    encode(Report(ReadyMany{std::move(ids)}), report);
    write(ranks, report);
  }
}

void Aggregator::record(const std::vector<Rank>& ranks, ByteView report) {
  write_ready();
  write(ranks, report);
}

void Aggregator::write(const std::vector<Rank>& ranks, ByteView report) {
  if (out_.empty()) Encoder(out_).put(uint32_t{0});
  uint32_t records;
  std::memcpy(&records, out_.data(), sizeof records);
  ++records;
  std::memcpy(out_.data(), &records, sizeof records);
  Encoder out(out_);
  out.put(ranks);
  out.put_bytes(report);
}

// Sends Expedite after the ranks' Ready reports, because a Ready tells the host above that the rank's user does not
// wait.
void Aggregator::tell_expedite() {
  if (!gathers_above_ || expediting_.empty() || std::exchange(expedite_sent_, true)) return;
  ByteString expedite;
  encode(Report(Expedite{}), expedite);
  record({expediting_.begin(), expediting_.end()}, expedite);
}

ByteString Aggregator::take(int64_t now_ns) {
  tell_expedite();
  if (nothing_waits() || (!expedites() && now_ns < sent_ns_ + gather_ns_)) return {};
  const bool burst = !expedites() && now_ns < sent_ns_ + 2 * kLongestGatherNs;
  gather_ns_ = burst ? std::min(2 * gather_ns_, kLongestGatherNs) : kShortestGatherNs;
  sent_ns_ = now_ns;
  urgent_ = false;
  write_ready();
  return std::exchange(out_, {});
}

void Aggregator::read(const Entry& entry) {
  asked_ = false;
  if (auto* define = std::get_if<Define>(&entry)) read_define(*define);
  if (auto* forget = std::get_if<Forget>(&entry)) read_forget(forget->id);
  if (auto* open = std::get_if<OpenSet>(&entry)) {
    std::ranges::set_intersection(open->ranks, below_, std::back_inserter(sets_[open->set].ranks));
  }
  if (auto* close = std::get_if<CloseSet>(&entry)) sets_.at(close->set).straight = true;
  if (auto* joined = std::get_if<Joined>(&entry); joined && sets_.contains(joined->set)) {
    sets_.at(joined->set).straight = false;
  }
  read_end(entry);
  if (std::holds_alternative<CloseSet>(entry)) release_all();
}

void Aggregator::tick(int64_t now_ns) {
  for (auto next = held_.begin(); next != held_.end();) {
    const auto& [key, held] = *next++;
    if (now_ns >= held.since_ns + kPatienceNs) release_early(key);
  }
}

int64_t Aggregator::next_tick() const {
  int64_t next = std::numeric_limits<int64_t>::max();
  if (!nothing_waits()) next = expedites() ? 0 : sent_ns_ + gather_ns_;
  for (auto& [key, held] : held_) next = std::min(next, held.since_ns + kPatienceNs);
  return next;
}

}  // namespace farandole
