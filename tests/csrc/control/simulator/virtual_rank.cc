// SPDX-License-Identifier: Apache-2.0
// A virtual rank's program. What the log tells it is in virtual_rank_log.cc.
#include <limits>
#include <utility>

#include "check.h"
#include "control/simulator/simulator.h"

namespace farandole::simulation {

using Kind = Action::Kind;

VirtualRank::VirtualRank(const Program& program, Rank rank, Simulator& world)
    : program_(program), rank_(rank), world_(world), outcomes_(program.calls.size()) {
  sets_.try_emplace(kWorldSet);
  ids_[0] = kWorldSet;
}

std::string VirtualRank::where() const {
  const auto& actions = program_.actions[static_cast<size_t>(rank_)];
  std::string text = "rank " + std::to_string(rank_) + ", action " + std::to_string(next_action_) +
                     " of " + std::to_string(actions.size());
  if (next_action_ < actions.size()) {
    const Action& action = actions[next_action_];
    text += " (kind " + std::to_string(static_cast<int>(action.kind)) + ", value " +
            std::to_string(action.value) + ")";
  }
  return text;
}

void VirtualRank::fail(const std::string& text) const { check::fail(where() + ": " + text); }

void VirtualRank::step() {
  const auto& actions = program_.actions[static_cast<size_t>(rank_)];
  while (!dead_ && !left_ && next_action_ < actions.size()) {
    if (!perform(actions[next_action_])) return;
    ++next_action_;
    if (!in_batch_ && world_.pause_here()) return world_.step_after(rank_, 0);
  }
}

bool VirtualRank::perform(const Action& action) {
  int value = static_cast<int>(action.value);
  switch (action.kind) {
    case Kind::kSubmit: return submit(value, action.more);
    case Kind::kDuplicate: {
      const PlannedCall& call = planned(value);
      auto id = ids_.find(call.set);
      bool named = id != ids_.end() && !call.request.name.empty();
      duplicates_ += named && name_of(id->second, call.request.name).call >= 0;
      return true;  // an error here, and nothing for anybody else
    }
    case Kind::kWait: return wait(value);
    case Kind::kWaitAll: return wait_all(value != 0);
    case Kind::kJoin: return join(value);
    case Kind::kSync: return sync(action.value);
    case Kind::kPause: return pause(action.value);
    case Kind::kLeave: leave(false); return true;
    case Kind::kFail: leave(true); return true;
    case Kind::kDie:
      dead_ = true;
      world_.die(rank_);
      return true;
  }
  return true;
}

// nullptr: never opened here.
VirtualRank::OpenedSet* VirtualRank::set_of(int planned_set, SetId& id) {
  auto found = ids_.find(planned_set);
  if (found == ids_.end()) return nullptr;
  id = found->second;
  return &sets_.at(id);
}

bool VirtualRank::submit(int index, bool more) {
  const PlannedCall& call = planned(index);
  SetId id = 0;
  OpenedSet* set = set_of(call.set, id);
  int member = program_.sets[static_cast<size_t>(call.set)].member_of(rank_);
  Request request = call.request_of(member);
  request.set = id;
  bool known = set != nullptr;
  if (call.removes >= 0) {
    SetId removed = -1;
    known = set_of(call.removes, removed) != nullptr;
    request.signature.root = removed;
  }
  bool named = !request.name.empty();
  if (known && named && name_of(id, request.name).call >= 0) {  // a careful user waits
    in_batch_ = false;
    hurry();
    return false;
  }
  in_batch_ = in_batch_ || more;  // its inputs don't ride along
  ++in_flight_;
  if (aborted_) {
    end(index, kPeerGone);
  } else if (!known) {
    end(index, kSkipped);
  } else if (set->closed) {
    end(index, kInvalid);
  } else if (call.message()) {
    post(index, member, std::move(request));
  } else {
    report_call(index, member, std::move(request), *set);
  }
  if (!more) send_batch();
  in_batch_ = more;
  return true;
}

// Lines of some unnamed calls differ between ranks, which must change nothing.
std::string VirtualRank::site_of(int index) const {
  if (index % 3 == 0) return {};
  return "line " + std::to_string((index + (index % 3) * (rank_ % 3)) % 5);
}

void VirtualRank::report_call(int index, int member, Request request, OpenedSet& set) {
  bool refuses = planned(index).roles[static_cast<size_t>(member)] == Role::kRefuse;
  CallKey key{request.set, request.name, 0};
  Ready ready;
  if (key.named() && refuses) {
    Name& name = name_of(request.set, request.name);
    (name.reported ? name.refused_since : name.refused).push_back(index);
  } else if (key.named()) {
    Name& name = name_of(request.set, request.name);
    name.call = index;
    name.reported = true;
    ready.id = name.id;
    const Request* defined = name.id == 0 ? nullptr : by_id_[name.id];
    if (!defined || !same_terms(*defined, request)) ready.id = 0;
  } else {
    key.sequence = ready.sequence = set.unnamed.next++;
    set.unnamed.waiting[key.sequence] = index;
    request.site = site_of(index);
    auto found = interned_.find(bytes_of(request));
    if (found != interned_.end()) ready.id = found->second;
  }
  if (refuses) {
    refused_.insert(index);
    report(Refuse{key, {ErrorCode::kWrongType, "refused"}});
    return;
  }
  ByteString storage;
  ready.contribution = contribution_of(program_, index, member, storage);
  const bool alone = in_flight_ == 1 || rank_ % 3 == 0;  // some ranks are on one host, others not
  if (in_batch_ || !alone || !request.more.empty()) ready.contribution.drop_payload();
  ready.more.assign(request.more.size(), ready.contribution);
  if (ready.id == 0) ready.request = std::move(request);
  if (key.named() && ready.id != 0 && ready.plain()) return batch_.add(ready.id);
  report(ready);
}

// A refused one is over at once; only the other end hears of it.
void VirtualRank::post(int index, int member, Request request) {
  const PlannedCall& call = planned(index);
  const bool sends = member == call.sender;
  const auto& ranks = program_.sets[static_cast<size_t>(call.set)].ranks;
  Post post;
  post.number = next_post_++;
  post.request = std::move(request);
  post.request.tag = call.tag;
  post.request.peer = ranks[static_cast<size_t>(sends ? call.receiver : call.sender)];
  if (!sends) {
    post.request.signature.op = Op::kReceive;
    if (call.from_any) post.request.peer = post.request.signature.root = kAnyRank;
  }
  if (call.roles[static_cast<size_t>(member)] == Role::kRefuse) {
    post.refusal = {ErrorCode::kWrongType, "refused"};
    end(index, kRefused);
    return report(post);
  }
  ByteString storage;
  if (sends) post.contribution = contribution_of(program_, index, member, storage);
  posted_[post.number] = index;
  report(post);
}

void VirtualRank::report(const Report& report) {
  send_batch();
  send(report);
}

void VirtualRank::send(const Report& report) {
  if (says_ready(report)) expedited_ = false;
  world_.report(rank_, report);
}

void VirtualRank::send_batch() {
  if (!batch_.empty()) send(ReadyMany{std::exchange(batch_, {})});
}

void VirtualRank::hurry() {
  send_batch();
  if (!std::exchange(expedited_, true)) report(Expedite{});
}

// A call that it refused itself is over for the caller at once.
bool VirtualRank::wait(int index) {
  if (refused_.contains(index) || outcome(index) != 0) return true;
  hurry();
  return false;
}

bool VirtualRank::wait_all(bool refused_too) {
  hurry();
  return std::cmp_equal(in_flight_, refused_too ? 0 : refused_.size());
}

bool VirtualRank::join(int planned_set) {
  SetId id = 0;
  OpenedSet* set = set_of(planned_set, id);
  if (!set || set->closed || aborted_ || (announced_ && !set->join_sent)) {
    announced_ = false;
    return true;
  }
  if (announced_) return false;
  set->join_sent = announced_ = true;
  report(Join{id});
  return false;
}

bool VirtualRank::sync(int64_t number) {
  if (!std::exchange(announced_, true)) world_.reach(rank_, number);
  if (!aborted_ && !world_.passed(number)) return false;
  announced_ = false;
  return true;
}

bool VirtualRank::pause(int64_t ns) {
  if (pause_until_ < 0) {
    pause_until_ = world_.now() + ns;
    world_.step_after(rank_, ns);
  }
  if (world_.now() < pause_until_) return false;
  pause_until_ = -1;
  return true;
}

void VirtualRank::leave(bool failed) {
  left_ = true;
  if (!failed) world_.reach(rank_, std::numeric_limits<int64_t>::max());
  report(Leave{failed || aborted_, failed ? "ValueError: planned" : ""});
}

}  // namespace farandole::simulation
