// SPDX-License-Identifier: Apache-2.0
// Unnamed calls that ranks make from different lines of the program. Calls without a name match by their order, so if one
// rank swaps or skips one, it may match another tensor's call of the same form, and the result is wrong though nothing
// fails.
#pragma once

#include <set>
#include <string>

#include "control/coordinator/outbox.h"
#include "control/coordinator/set_table.h"

namespace farandole {

class CallSites {
 public:
  // `strict`: such a call fails.
  CallSites(bool strict, Outbox& outbox) : strict_(strict), outbox_(outbox) {}

  // To be called once for each call that is complete and agreed. If not strict, the set's ranks get a notice, one for all
  // calls that match from the same lines.
  Failure judge(const SetState& set, const Call& call);

 private:
  const bool strict_;
  Outbox& outbox_;
  std::set<std::string> told_;  // lines
};

}  // namespace farandole
