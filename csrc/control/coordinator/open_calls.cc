// SPDX-License-Identifier: Apache-2.0
#include "control/coordinator/open_calls.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace farandole {
namespace {

constexpr uint64_t kMaxUnnamedAhead = 1 << 20;  // calls that a rank may be ahead of the slowest

}  // namespace

void OpenCalls::check_place(const Request& request, uint64_t sequence) {
  CallKey key;
  key.sequence = sequence;
  if (key.index_in_group() < static_cast<uint64_t>(std::max(request.signature.group_size, 1)))
    return;
  throw Error(ErrorCode::kInternal, "a call has a place outside its group");
}

Call& OpenCalls::unnamed_slot(SetState& set, uint64_t sequence) {
  if (CallKey{set.id, "", sequence}.index_in_group() > 0) {
    auto& follower = set.followers[sequence];
    if (!follower) follower = std::make_unique<Call>();
    return *follower;
  }
  if (sequence < set.first_unnamed || sequence - set.first_unnamed > kMaxUnnamedAhead) {
    throw Error(ErrorCode::kInternal, "an unnamed call is out of order");
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
  for (int m = 0; by_members(request) && m < set.members(); ++m) {
    if (std::ranges::count(request.signature.shape, m) == 0) call.arrive_joined(m);
  }
  if (set.joined.empty()) return;
  for (int m : set.joined.members()) {
    if (!call.arrived().contains(m)) call.arrive_joined(m);
  }
}

void OpenCalls::retire(Call& call) {
  Definition& definition = *registry_.at(call.id());
  --definition.uses;
  call.close();
}

void OpenCalls::fail(Call& call, const Failure& failure) {
  outbox_.write(Fail{call.key(), failure});
  retire(call);
}

void OpenCalls::write_unheard(const SetState& set, const Call& call, const Failure& failure) {
  std::vector<Rank> unheard;
  for (int m : call.arrived().missing()) unheard.push_back(set.rank_of(m));
  outbox_.write(Fail{call.key(), failure, std::move(unheard)});
}

void OpenCalls::end(SetState& set, Call& call, const Failure& failure) {
  write_unheard(set, call, failure);
  retire(call);
}

void OpenCalls::give_up(SetState& set, Call& call, const Failure& failure) {
  write_unheard(set, call, failure);
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
  std::erase_if(set.followers, [&](const auto& entry) { return finished(*entry.second); });
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
  for (auto& [sequence, call] : set.followers) {
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
