// SPDX-License-Identifier: Apache-2.0
#include "control/coordinator/group_rules.h"

#include <algorithm>
#include <utility>

namespace farandole {

// The first failure fails the group's complete calls at once, and the others when they are complete. Only the
// call that leads it fails last: users wait for that one first, and may make the same call again when it fails.
void GroupRules::settle(SetState& set, Call& call, const std::vector<Terms::Group>& groups,
                        const Failure& failure) {
  const Request& terms = call.request();
  const bool leads = groups.size() == 1 && terms.group == groups[0].name &&
                     !follows(terms, call.key().index_in_group());
  if (failure && !leads) calls_.fail(call, failure);
  for (const auto& [name, size] : groups) {  // one, unless the members disagree
    CallGroup& group = set.groups[name];
    bool whole = ++group.settled >= size;
    if (failure && !group.failure) group.failure = failure;
    if (leads) group.leader = &call;
    if (leads || !failure) group.calls.push_back(&call);
    if (group.failure) {
      fail(group, whole);
    } else if (whole) {
      for (Call* member : group.calls) publisher_.queue(set, *member);
    }
    if (whole) set.groups.erase(name);
  }
}

void GroupRules::fail(CallGroup& group, bool whole) {
  for (Call* member : std::exchange(group.calls, {})) {
    if (member != group.leader) calls_.fail(*member, group.failure);
  }
  if (whole && group.leader) calls_.fail(*group.leader, group.failure);
}

bool GroupRules::break_group(SetState& set, Call& call, const Failure& failure) {
  const std::vector<Terms::Led> led = call.terms().led(call.key().index_in_group(), call.arrived());
  if (led.empty() || !call.terms().uneven()) return false;
  BrokenGroup& group = set.broken.emplace_back(BrokenGroup{&call, {}, 0, failure});
  for (const auto& [name, followers, members] : led) {
    group.names.push_back(name);
    group.reports += static_cast<size_t>(followers) * static_cast<size_t>(members);
    set.groups.erase(name);
  }
  settle_broken(set, call);
  return true;
}

// Waits for all announced reports of the group: a late report after its end would begin a new call.
bool GroupRules::settle_broken(SetState& set, const Call& call) {
  const std::string& name = call.request().group;
  auto group = std::ranges::find_if(set.broken, [&](const BrokenGroup& broken) {
    return broken.first == &call || std::ranges::count(broken.names, name) > 0;
  });
  if (group == set.broken.end()) return false;
  std::vector<Call*> calls;
  size_t reports = 0;
  for (Call* other : calls_.all(set)) {
    const bool one_of_it = std::ranges::count(group->names, other->request().group) > 0 &&
                           follows(other->request(), other->key().index_in_group());
    if (!one_of_it) continue;
    calls.push_back(other);
    reports += other->terms().outspoken(other->arrived()).size();
  }
  if (reports < group->reports) return true;
  calls.push_back(group->first);
  for (Call* failed : calls) calls_.end(set, *failed, group->failure);
  set.broken.erase(group);
  return true;
}

}  // namespace farandole
