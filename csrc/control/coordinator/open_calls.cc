// SPDX-License-Identifier: Apache-2.0
#include "control/coordinator/open_calls.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace farandole {
namespace {

constexpr uint64_t kMaxUnnamedAhead = 1 << 20;  // lead over the slowest rank, in calls

// True if the call need not wait for this member, because the member has joined, has left or does not take part.
bool goes_without(const SetState& set, const Request& request, int member) {
  if (set.joined.contains(member) && set.left.empty()) return true;  // a leave ends all joins
  if (set.left.contains(member)) return spares_the_left(request);
  return by_members(request) && std::ranges::count(request.signature.shape, member) == 0;
}

}  // namespace

Posted::Posted(Rank its_rank, const Post& its_post, int64_t now_ns)
    : rank(its_rank),
      payload(its_post.contribution.payload.begin(), its_post.contribution.payload.end()),
      post(its_post),
      since_ns(now_ns) {
  post.contribution.payload = payload;
}

std::string text_of(const Posted& posted) {
  const Request& request = posted.request();
  std::string text = name_of(request.signature.op);
  if (!request.name.empty()) text += " '" + request.name + "'";
  text += " of rank " + std::to_string(posted.rank) + (posted.sends() ? " to " : " from ");
  text += request.peer == kAnyRank ? "any rank" : "rank " + std::to_string(request.peer);
  text += " with tag " + std::to_string(request.tag);
  if (request.set != kWorldSet) text += " in process set " + std::to_string(request.set);
  return text;
}

std::optional<Posted> PostTable::take_match(const Posted& posted) {
  auto best = queues_.end();
  auto consider = [&](Queues::iterator queue) {
    if (queue == queues_.end()) return;
    const bool earlier =
        best == queues_.end() || queue->second.front().arrival < best->second.front().arrival;
    if (earlier) best = queue;
  };
  if (posted.sends()) {
    consider(queues_.find(key_of(posted, End::kReceiver, posted.rank)));
    consider(queues_.find(key_of(posted, End::kReceiver, kAnyRank)));
  } else if (posted.request().peer != kAnyRank) {
    consider(queues_.find(key_of(posted, End::kSender, posted.request().peer)));
  } else {
    const auto last = queues_.lower_bound(key_of(posted, End::kReceiver, kAnyRank));
    auto queue = queues_.lower_bound(key_of(posted, End::kSender, kAnyRank));
    for (; queue != last; ++queue) consider(queue);
  }
  if (best == queues_.end()) return std::nullopt;
  Posted match = std::move(best->second.front());
  best->second.pop_front();
  if (best->second.empty()) queues_.erase(best);
  return match;
}

void PostTable::add(Posted posted) {
  posted.arrival = ++arrivals_;
  const End end = posted.sends() ? End::kSender : End::kReceiver;
  queues_[key_of(posted, end, posted.sender())].push_back(std::move(posted));
}

void PostTable::fail(const Posted& posted, const Failure& failure) {
  if (!posted.post.refusal) outbox_.write(Fail{posted.key(), failure});
}

void PostTable::fail_if(const std::function<Failure(const Posted&)>& fault) {
  for (auto& [key, queue] : queues_) {
    std::erase_if(queue, [&](const Posted& posted) {
      const Failure failure = fault(posted);
      if (failure) fail(posted, failure);
      return static_cast<bool>(failure);
    });
  }
  std::erase_if(queues_, [](const auto& entry) { return entry.second.empty(); });
}

std::string Registry::key_of(const Request& request) {
  if (!request.name.empty()) return std::to_string(request.set) + "/" + request.name;
  return "=" + bytes_of(request);
}

Definition* Registry::at(uint32_t id) { return id < table_.size() ? table_[id].get() : nullptr; }

Definition& Registry::intern(const Request& request) {
  auto [found, fresh] = by_key_.try_emplace(key_of(request), 0);
  if (!fresh) return *table_[found->second];
  if (free_.empty()) {
    free_.push_back(static_cast<uint32_t>(table_.size()));
    table_.emplace_back();
  }
  uint32_t id = free_.back();
  free_.pop_back();
  found->second = id;
  auto definition = std::make_unique<Definition>();
  definition->id = id;
  definition->request = request;
  definition->recency = recency_.insert(recency_.end(), id);
  table_[id] = std::move(definition);
  return *table_[id];
}

void Registry::touch(Definition& definition) {
  recency_.splice(recency_.end(), recency_, definition.recency);
}

std::vector<uint32_t> Registry::evict() {
  std::vector<uint32_t> victims;
  if (recency_.size() <= capacity_) return victims;
  for (size_t looks = 2 * (recency_.size() - capacity_); looks > 0; --looks) {
    if (recency_.size() <= capacity_) break;
    Definition& definition = *table_[recency_.front()];
    if (definition.uses > 0) {
      touch(definition);
      continue;
    }
    recency_.pop_front();
    by_key_.erase(key_of(definition.request));
    if (definition.published) {
      definition.forgetting = true;
      definition.forgotten = MemberMask(world_size_);
      victims.push_back(definition.id);
    } else {
      free_.push_back(definition.id);
      table_[definition.id].reset();
    }
  }
  return victims;
}

void Registry::forgot(uint32_t id, Rank rank) {
  Definition* definition = at(id);
  if (!definition || !definition->forgetting) return;
  definition->forgotten.insert(rank);
  if (!definition->forgotten.full()) return;
  table_[id].reset();
  free_.push_back(id);
}

Call& OpenCalls::unnamed_slot(SetState& set, uint64_t sequence) {
  if (sequence < set.first_unnamed || sequence - set.first_unnamed > kMaxUnnamedAhead) {
    throw Error(ErrorCode::kInternal, "a rank reported its unnamed calls out of order");
  }
  while (set.first_unnamed + set.unnamed.size() <= sequence) {
    set.unnamed.push_back(std::make_unique<Call>());
  }
  return *set.unnamed[sequence - set.first_unnamed];
}

void OpenCalls::open(SetState& set, Definition& definition, Call& call, const Request& request,
                     uint64_t sequence, int64_t now_ns) {
  bool as_defined = &definition.request == &request || same_terms(definition.request, request);
  call.open({set.id, request.name, sequence}, definition.id,
            as_defined ? &definition.request : nullptr, request, set.members(), now_ns);
  ++definition.uses;
  registry_.touch(definition);
  if (set.joined.empty() && !request.signature.traits().changes_sets) return;
  for (int m = 0; m < set.members(); ++m) {
    if (goes_without(set, request, m)) call.arrive_joined(m);
  }
}

void OpenCalls::retire(Call& call) {
  Definition& definition = *registry_.at(call.id());
  --definition.uses;
  std::ranges::move(call.take_later(), std::back_inserter(due_));
  call.close();
}

void OpenCalls::fail(Call& call, const Failure& failure) {
  outbox_.write(Fail{call.key(), failure});
  retire(call);
}

void OpenCalls::give_up(SetState& set, Call& call, const Failure& failure) {
  std::vector<Rank> unheard;
  for (int m : call.arrived().missing()) unheard.push_back(set.rank_of(m));
  outbox_.write(Fail{call.key(), failure, std::move(unheard)});
  if (call.key().named() || call.complete()) {
    retire(call);
  } else {
    call.give_up(failure);
  }
}

void OpenCalls::drop_finished(SetState& set) {
  auto finished = [](const Call& c) { return !c.is_open() && c.id() != 0; };
  while (!set.unnamed.empty() && finished(*set.unnamed.front())) {
    set.unnamed.pop_front();
    ++set.first_unnamed;
  }
}

std::vector<Call*> OpenCalls::all(SetState& set) {
  std::vector<Call*> calls;
  registry_.for_each([&](Definition& definition) {
    Call& call = definition.call;
    if (call.is_open() && call.key().set == set.id) calls.push_back(&call);
  });
  for (auto& call : set.unnamed) {
    if (call->is_open()) calls.push_back(call.get());
  }
  return calls;
}

std::vector<Call*> OpenCalls::waiting(SetState& set) {
  std::vector<Call*> calls = all(set);
  std::erase_if(calls, [](Call* call) { return call->is_queued() || call->given_up(); });
  return calls;
}

}  // namespace farandole
