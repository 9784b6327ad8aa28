// SPDX-License-Identifier: Apache-2.0
// What holds of the calls of one group: all are published, or none.
#pragma once

#include <vector>

#include "control/coordinator/open_calls.h"
#include "control/coordinator/publisher.h"

namespace farandole {

class GroupRules {
 public:
  GroupRules(OpenCalls& calls, Publisher& publisher) : calls_(calls), publisher_(publisher) {}

  // A call of these groups is complete. failure: of that call; code kOk: all agree.
  void settle(SetState& set, Call& call, const std::vector<Terms::Group>& groups,
              const Failure& failure);
  // Whether a complete call that fails takes a whole group with it, as its first call.
  bool break_group(SetState& set, Call& call, const Failure& failure);
  // Whether a call, complete or not, belongs to a group that is broken, and is settled with it.
  bool settle_broken(SetState& set, const Call& call);

 private:
  OpenCalls& calls_;
  Publisher& publisher_;
};

}  // namespace farandole
