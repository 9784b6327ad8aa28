// SPDX-License-Identifier: Apache-2.0
// What reports do to calls. Publishing is in coordinator_publish.cc, process sets and leaving in
// coordinator_sets.cc, calls that wait too long in coordinator_stall.cc, prediction in
// coordinator_bundles.cc.
#include "control/coordinator/coordinator.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "control/coordinator/open_bundle.h"

namespace farandole {
namespace {

constexpr uint64_t kMaxUnnamedAhead = 1 << 20;  // calls of one rank ahead of the slowest

// What every rank checks before it reports; a rank that did not is broken.
void check_request(const Request& request) {
  const Signature& s = request.signature;
  bool sound = s.op != Op::kJoin && s.group_size >= 1;
  if (s.traits().changes_sets) {
    sound = sound && request.set == kWorldSet;
  } else {
    int64_t bytes = static_cast<int64_t>(size_of(s.dtype));
    const bool ragged = s.traits().ragged();
    for (size_t i = 0; i < s.shape.size(); ++i) {
      bool any_length = ragged && i == 0 && s.shape[i] == -1;
      if (any_length || s.shape[i] == 0) continue;
      sound = sound && s.shape[i] > 0 && !__builtin_mul_overflow(bytes, s.shape[i], &bytes);
    }
    sound = sound && !(ragged && (s.shape.empty() || s.shape[0] != -1));
  }
  if (!sound) {
    throw Error(ErrorCode::kInternal,
                "a rank reports an impossible request under the name '" + request.name + "'");
  }
}

Failure removed(SetId set) {
  return {ErrorCode::kInvalidArgument, "process set " + std::to_string(set) + " was removed"};
}

}  // namespace

Coordinator::Coordinator(Settings settings)
    : settings_(settings),
      registry_(settings.size, settings.capacity),
      left_(settings.size),
      next_tick_ns_(std::numeric_limits<int64_t>::max()),
      heard_ns_(static_cast<size_t>(settings.size), -1) {
  std::vector<Rank> world(static_cast<size_t>(settings.size));
  std::iota(world.begin(), world.end(), 0);
  open_set(kWorldSet, std::move(world));
}

Coordinator::~Coordinator() = default;

void Coordinator::receive(Rank from, const Report& report, int64_t now_ns) {
  now_ns_ = now_ns;
  std::visit(
      [&](const auto& r) {
        using T = std::remove_cvref_t<decltype(r)>;
        if (broken_ && !std::is_same_v<T, Leave> && !std::is_same_v<T, Forgot>) return;
        on(from, r, now_ns);
      },
      report);
}

int Coordinator::member_of(const Set& set, Rank rank) {
  if (set.id == kWorldSet) return rank;
  auto found = std::lower_bound(set.ranks.begin(), set.ranks.end(), rank);
  if (found == set.ranks.end() || *found != rank) return -1;
  return static_cast<int>(found - set.ranks.begin());
}

// nullptr: the set was removed; the rank can't have known. Throws if it must have known better.
Coordinator::Set* Coordinator::set_of(SetId id, Rank from) {
  auto found = sets_.find(id);
  bool removed = found == sets_.end() && id > kWorldSet && id < next_set_;
  if (removed) return nullptr;
  if (found == sets_.end() || member_of(*found->second, from) < 0) {
    throw Error(ErrorCode::kInternal, "rank " + std::to_string(from) + " reports to process set " +
                                          std::to_string(id) + ", which is none of its own");
  }
  return found->second.get();
}

Call& Coordinator::unnamed_slot(Set& set, uint64_t sequence) {
  if (sequence < set.first_unnamed || sequence - set.first_unnamed > kMaxUnnamedAhead) {
    throw Error(ErrorCode::kInternal, "an unnamed call is out of order");
  }
  while (set.first_unnamed + set.unnamed.size() <= sequence) {
    set.unnamed.push_back(std::make_unique<Call>());
  }
  return *set.unnamed[sequence - set.first_unnamed];
}

// The call that this request is about; opened, with the joined members in it, if it is the first.
Call& Coordinator::find_call(Set& set, Definition& definition, const Request& request,
                             uint64_t sequence, int64_t now_ns) {
  bool named = !request.name.empty();
  if (OpenBundle* bundle = definition.bundle; bundle && !definition.call.is_open()) {
    begin_round(*bundle, now_ns);
    spill(*bundle, now_ns);
    if (!definition.call.is_open()) ++bundle->open;
  }
  Call& call = named ? definition.call : unnamed_slot(set, sequence);
  if (call.is_open()) return call;
  bool as_defined =
      &definition.request == &request || (definition.request.signature == request.signature &&
                                          definition.request.group == request.group);
  call.open({set.id, request.name, sequence}, definition.id,
            as_defined ? &definition.request : nullptr, request, set.members(), now_ns);
  ++definition.uses;
  registry_.touch(definition);
  if (!set.joined.empty()) {
    for (int m : set.joined.members()) call.arrive_joined(m);
  }
  expect_progress(now_ns, now_ns);
  return call;
}

// For whoever comes when nothing can be done any more: one entry serves all that come in one batch.
void Coordinator::fail_late(const CallKey& key, const Failure& failure) {
  if (!late_.emplace(key.set, key.name, key.sequence).second) return;
  log_.push_back(Fail{key, failure});
}

void Coordinator::on(Rank from, const Ready& ready, int64_t now_ns) {
  Definition* known = registry_.at(ready.id);
  if (ready.id != 0 && !known) throw Error(ErrorCode::kInternal, "a rank reports an unknown id");
  const Request& request = known ? known->request : ready.request;
  if (!known) check_request(request);
  Set* set = set_of(request.set, from);
  if (!set || !set->left.empty()) {
    CallKey key{request.set, request.name, ready.sequence};
    return fail_late(key, set ? blame_leavers(*set, key, request) : removed(request.set));
  }
  // An id that is being forgotten may already stand anew under its name.
  bool current = known && !known->forgetting;
  Definition& definition = current ? *known : registry_.intern(request);
  bool unforeseen = definition.bundle && (!known || !ready.contribution.has_input);
  if (unforeseen) unbundle(*definition.bundle, now_ns);
  Call& call = find_call(*set, definition, request, ready.sequence, now_ns);
  bool same = current && !call.redefines() && call.id() == ready.id;
  call.arrive(member_of(*set, from), request, same, ready.contribution);
  call.note(member_of(*set, from), now_ns);
  if (call.complete()) came_last(*set, from, now_ns - call.since_ns());
  heard_ns_[static_cast<size_t>(from)] = now_ns;
  settle(*set, call);
}

void Coordinator::on(Rank from, const Refuse& refuse, int64_t now_ns) {
  Set* set = set_of(refuse.key.set, from);
  Request request{refuse.key.set, refuse.key.name, {}, {}};
  if (!set || !set->left.empty()) {
    return fail_late(refuse.key,
                     set ? blame_leavers(*set, refuse.key, request) : removed(request.set));
  }
  Definition& definition = registry_.intern(request);
  if (definition.bundle) unbundle(*definition.bundle, now_ns);
  Call& call = find_call(*set, definition, request, refuse.key.sequence, now_ns);
  call.refuse(member_of(*set, from), refuse.failure);
  settle(*set, call);
}

void Coordinator::on(Rank from, const Done& done, int64_t now_ns) {
  Set* set = set_of(done.set, from);
  if (!set) return;
  if (from != set->ranks.front() || done.bucket > (done.gpu ? set->gpu_buckets : set->buckets)) {
    throw Error(ErrorCode::kInternal, "a rank reports a bucket as done that is not its own");
  }
  if (done.gpu) {
    set->gpu_buckets_done = std::max(set->gpu_buckets_done, done.bucket);
    return;
  }
  if (done.bucket > set->buckets_done) set->moving_since_ns = now_ns;
  set->buckets_done = std::max(set->buckets_done, done.bucket);
  if (set->is_moving()) expect_progress(now_ns, now_ns);
}

void Coordinator::on(Rank from, const Forgot& forgot, int64_t) {
  registry_.forgot(forgot.id, from);
}

// Faults that only the whole call shows.
Failure Coordinator::verdict(const Set& set, Call& call) const {
  if (auto failure = call.failure(set.ranks)) return *failure;
  const Signature& s = call.signature();
  if (s.traits().rooted()) {
    int root = s.root < 0 || s.root >= settings_.size ? -1 : member_of(set, s.root);
    if (root < 0 || !call.has_input(root)) {
      return {ErrorCode::kInvalidArgument,
              text_of(call.key(), call.request()) + ": root rank " + std::to_string(s.root) +
                  " brings no tensor: it is not in the process set, or it has joined"};
    }
  }
  return {};
}

void Coordinator::came_last(const Set& set, Rank rank, int64_t after_ns) {
  if (set.members() > 1) late_ranks_.push_back({rank, after_ns});
}

void Coordinator::settle(Set& set, Call& call) {
  if (call.given_up()) fail_late(call.key(), call.given_up());
  if (!call.complete()) return;
  if (call.given_up()) return retire(call);
  Failure failure = verdict(set, call);
  auto groups = call.groups();
  if (!groups.empty()) return settle_grouped(set, call, groups, failure);
  if (failure) return fail(call, failure);
  queue(set, call);
}

// All or none: the first failure fails those that are complete, and the others when they are.
void Coordinator::settle_grouped(Set& set, Call& call, const std::vector<Call::GroupTerms>& groups,
                                 const Failure& failure) {
  if (failure) fail(call, failure);
  for (const auto& [name, size] : groups) {  // one, unless the members disagree about it
    Group& group = set.groups[name];
    bool whole = ++group.settled >= size;
    if (failure && !group.failure) group.failure = failure;
    if (!failure) group.calls.push_back(&call);
    if (group.failure || whole) {
      for (Call* member : std::exchange(group.calls, {})) {
        if (group.failure) {
          fail(*member, group.failure);
        } else {
          queue(set, *member);
        }
      }
    }
    if (whole) set.groups.erase(name);
  }
}

void Coordinator::fail(Call& call, const Failure& failure) {
  log_.push_back(Fail{call.key(), failure});
  retire(call);
}

// The call itself stays where it is: flush() clears unnamed ones away.
void Coordinator::retire(Call& call) {
  Definition& definition = *registry_.at(call.id());
  --definition.uses;
  if (definition.bundle) --definition.bundle->open;
  call.close();
}

std::vector<Call*> Coordinator::open_calls(Set& set) {
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

}  // namespace farandole
