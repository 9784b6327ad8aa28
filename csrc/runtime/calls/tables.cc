// SPDX-License-Identifier: Apache-2.0
#include "runtime/calls/tables.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"

namespace farandole {

void ProcessSets::open(SetId id, std::vector<Rank> ranks) {
  ProcessSet set;
  set.ranks = std::move(ranks);
  set.member = set.member_of(own_);
  sets_[id] = std::move(set);
}

ProcessSet* ProcessSets::find(SetId id) {
  auto found = sets_.find(id);
  return found == sets_.end() ? nullptr : &found->second;
}

ProcessSet& ProcessSets::own(SetId id) {
  ProcessSet* set = find(id);
  if (!set) {
    throw Error(ErrorCode::kInvalidArgument,
                "there is no process set " + std::to_string(id) +
                    "; was it removed, or never added with add_process_set()?");
  }
  if (set->member < 0) {
    throw Error(ErrorCode::kInvalidArgument, "rank " + std::to_string(own_) +
                                                 " is not in process set " + std::to_string(id) +
                                                 " of " + text_of_ranks(set->ranks));
  }
  return *set;
}

std::optional<SetId> ProcessSets::joined_by(Handle handle) const {
  for (const auto& [id, set] : sets_) {
    if (set.join.call == handle) return id;
  }
  return std::nullopt;
}

std::optional<SetId> ProcessSets::meeting() const {
  auto found = std::ranges::find_if(sets_, [](const auto& one) { return one.second.meeting; });
  return found == sets_.end() ? std::nullopt : std::optional(found->first);
}

void ProcessSets::clear_under_way() {
  for (auto& [id, set] : sets_) {
    set.join = {};
    set.under_way = 0;
  }
}

Failure gone(SetId set) {
  return {ErrorCode::kInvalidArgument,
          "process set " + std::to_string(set) + " was removed while this call was under way"};
}

std::shared_ptr<NamedRequest> PendingTable::find(SetId set, const std::string& name) const {
  auto names = named_.find(set);
  if (names == named_.end()) return nullptr;
  auto found = names->second.find(name);
  return found == names->second.end() ? nullptr : found->second;
}

NamedRequest& PendingTable::named(const Request& request) {
  auto& slot = named_[request.set][request.name];
  if (!slot) slot = std::make_shared<NamedRequest>(request.set, request.name);
  return *slot;
}

void PendingTable::check_free(const Request& request, Submission& submission,
                              std::shared_ptr<NamedRequest>& record) const {
  if (!record || !record->listed) {
    record = request.name.empty() ? nullptr : find(request.set, request.name);
  }
  submission.named = record.get();
  if (!submission.named || !submission.named->in_flight) return;
  throw Error(
      ErrorCode::kInvalidArgument,
      "'" + request.name +
          "' is in flight already on this rank; wait for it first, or use a different name");
}

void PendingTable::submit(const Request& request, Submission submission, Ready& ready) {
  if (request.name.empty()) {
    NumberedCalls& calls = unnamed_[request.set];
    ready.sequence = calls.next++;
    calls.waiting.emplace(ready.sequence, std::move(submission));
    auto known = interned_.find(bytes_of(request));
    if (known != interned_.end()) ready.id = known->second;
  } else {
    if (!submission.named) submission.named = &named(request);
    NamedRequest& record = *submission.named;
    record.submission = std::move(submission);
    record.in_flight = record.reported = true;
  }
  if (ready.id == 0) ready.request = request;
}

uint32_t PendingTable::submit_known(const Request& request, Submission& submission) {
  NamedRequest* record = submission.named;
  if (!record || !stands_for(*record, request, submission.prepared)) return 0;
  record->submission = std::move(submission);
  record->in_flight = record->reported = true;
  return record->id;
}

uint64_t PendingTable::definition_of(const Request& request, const Submission& submission,
                                     FoundId& found) const {
  if (!request.name.empty()) {
    NamedRequest* record = submission.named;
    const bool known =
        record && record->idle() && stands_for(*record, request, submission.prepared);
    return known ? by_id_[record->id]->definition : 0;
  }
  const bool still = found.id < by_id_.size() && by_id_[found.id] &&
                     by_id_[found.id]->definition == found.definition;
  if (!still) {
    auto known = interned_.find(bytes_of(request));
    if (known == interned_.end()) return 0;
    found = {known->second, by_id_[known->second]->definition};
  }
  return found.definition;
}

// True if the record's id stands for this request. Remembers a positive result for a prepared call.
bool PendingTable::stands_for(NamedRequest& record, const Request& request,
                              uint64_t prepared) const {
  if (record.id == 0) return false;
  if (prepared != 0 && record.same == prepared) return true;
  if (!same_terms(request_of(record.id), request)) return false;
  record.same = prepared;
  return true;
}

std::optional<CallKey> PendingTable::key_of(Handle handle) const {
  for (const auto& [set, names] : named_) {
    for (const auto& [name, record] : names) {
      if (record->reported && record->submission.holds(handle)) {
        return CallKey{set, name, 0};
      }
    }
  }
  for (const auto& [set, calls] : unnamed_) {
    if (const auto number = calls.number_of(handle)) return CallKey{set, "", *number};
  }
  return std::nullopt;
}

Refuse PendingTable::refuse(const Request& request, Failure failure) {
  Refuse refusal{{request.set, request.name, 0}, std::move(failure)};
  if (request.signature.traits().changes_sets) {
    refusal.op = request.signature.op;
    if (by_members(request)) refusal.members = request.signature.shape;
  }
  if (request.name.empty()) {
    refusal.key.sequence = unnamed_[request.set].next++;
  } else {
    NamedRequest& record = named(request);
    ++(record.reported ? record.refused_since : record.refused);
  }
  return refusal;
}

void PendingTable::define(const Define& define) {
  if (by_id_.size() <= define.id) by_id_.resize(define.id + 1);
  by_id_[define.id] = {define.request, nullptr, ++definitions_};
  if (define.request.name.empty()) {
    interned_[bytes_of(define.request)] = define.id;
    return;
  }
  NamedRequest& record = named(define.request);
  record.id = define.id;
  record.same = 0;
  by_id_[define.id]->named = &record;
}

void PendingTable::forget(uint32_t id) {
  const auto& [request, record, definition] = known(id);
  if (request.name.empty()) interned_.erase(bytes_of(request));
  if (record) {
    if (record->id == id) record->id = 0;
    drop_unknown(*record);
  }
  by_id_[id].reset();
}

const PendingTable::Known& PendingTable::known(uint32_t id) const {
  if (id >= by_id_.size() || !by_id_[id]) {
    throw Error(ErrorCode::kInternal, "the log names an id that it has not defined");
  }
  return *by_id_[id];
}

std::optional<Submission> PendingTable::take(uint32_t id, uint64_t sequence) {
  const auto& [request, record, definition] = known(id);
  if (!request.name.empty()) return take(record);
  return take(CallKey{request.set, "", sequence});
}

std::optional<Submission> PendingTable::take(NamedRequest* record) {
  if (!record || !record->reported) return std::nullopt;
  record->reported = false;
  record->refused += std::exchange(record->refused_since, 0);
  return std::move(record->submission);
}

std::optional<Submission> PendingTable::take(const CallKey& key) {
  if (key.named()) return take(find(key.set, key.name).get());
  return unnamed_[key.set].take(key.sequence);
}

std::optional<Submission> PendingTable::fail(const CallKey& key) {
  const auto record = key.named() ? find(key.set, key.name) : nullptr;
  if (!record || record->refused == 0) return take(key);
  --record->refused;
  drop_unknown(*record);
  return std::nullopt;
}

void PendingTable::finish(const Submission& submission) {
  if (!submission.named) return;
  submission.named->in_flight = false;
  drop_unknown(*submission.named);
}

// Drops the name if it is not in use and has no id.
void PendingTable::drop_unknown(const NamedRequest& record) {
  if (record.id != 0 || !record.idle() || !record.listed) return;
  auto names = named_.find(record.set);
  auto found = names->second.find(record.name);
  found->second->listed = false;
  names->second.erase(found);
}

// The next number never decreases, because once a rank has left, a join may end while calls of this rank are in flight.
void PendingTable::resume(SetId set, uint64_t next_sequence) {
  uint64_t& next = unnamed_[set].next;
  next = std::max(next, next_sequence);
}

void PendingTable::clear() {
  for (auto& known : by_id_) {
    if (known) known->named = nullptr;
  }
  for (auto& [set, names] : named_) {
    for (auto& [name, record] : names) record->listed = false;
  }
  named_.clear();
  unnamed_.clear();
}

void Reporter::pass(const Report& report) {
  pass_batch();
  write(report);
}

void Reporter::pass_known(uint32_t id, Contribution&& given, std::vector<Contribution>&& more) {
  if (!given.plain() || !std::ranges::all_of(more, &Contribution::plain)) {
    return pass(Ready{id, {}, 0, std::move(given), std::move(more)});
  }
  IdRuns& ids = std::get<ReadyMany>(batch_).ids;
  ids.add(id);
  if (ids.full()) pass_batch();
}

void Reporter::pass_batch() {
  IdRuns& ids = std::get<ReadyMany>(batch_).ids;
  if (ids.empty()) return;
  write(batch_);
  ids.clear();
}

void Reporter::write(const Report& report) {
  if (expedited_ && says_ready(report)) expedited_ = false;
  encoded_.clear();
  encode(report, encoded_);
  channel_.report(encoded_);
  news_.store(true, std::memory_order_release);
}

void Reporter::send(const Report& report) {
  pass(report);
  if (take_news()) channel_.wake_leader();
}

bool Reporter::flush() {
  if (!channel_.can_flush()) return false;
  channel_.flush();
  channel_.wake_leader();
  return true;
}

void Reporter::expedite() {
  if (!expedited_.exchange(true)) pass(Expedite{});
}

}  // namespace farandole
