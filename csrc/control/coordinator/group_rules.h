// SPDX-License-Identifier: Apache-2.0
// The rule for the calls of a group: either all are published or none.
#pragma once

#include <vector>

#include "control/coordinator/open_calls.h"
#include "control/coordinator/publisher.h"

namespace farandole {

class GroupRules {
 public:
  GroupRules(OpenCalls& calls, Publisher& publisher) : calls_(calls), publisher_(publisher) {}

  // One call of these groups is complete. `failure`: that call's; code kOk: all agree.
  void settle(SetState& set, Call& call, const std::vector<Terms::Group>& groups,
              const Failure& failure);
  // Whether a complete, failing call is the first of a group and fails the whole group.
  bool break_group(SetState& set, Call& call, const Failure& failure);
  // Whether a call, complete or not, belongs to a broken group and is settled with it.
  bool settle_broken(SetState& set, const Call& call);

 private:
  void fail(CallGroup& group, bool whole);

  OpenCalls& calls_;
  Publisher& publisher_;
};

}  // namespace farandole
