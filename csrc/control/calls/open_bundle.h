// SPDX-License-Identifier: Apache-2.0
// The coordinator's side of a bundle: calls that the members of a set may report together.
#pragma once

#include <cstdint>
#include <vector>

#include "base/types.h"
#include "control/calls/member_mask.h"

namespace farandole {

struct OpenBundle {
  uint32_t id = 0;
  SetId set = kWorldSet;
  std::vector<uint32_t> ids;  // their definitions stay while the bundle does
  size_t bytes = 0;           // that one round moves

  // The round under way. A member reports the bundle or each of its calls. While all report the bundle
  // they are counted in `arrived`; once a call is open by itself, everybody's are: one of the two is 0.
  MemberMask arrived;
  int open = 0;
  int64_t since_ns = 0;
  bool queued = false;  // complete; waits for the lane

  bool closing = false;  // Unbundle is in the log
  MemberMask split;      // world ranks that have said their last word
  int members = 0;

  bool idle() const { return arrived.empty() && open == 0; }
  bool waits() const { return !closing && !queued && !idle(); }
  void end_round() {
    arrived.clear();
    queued = false;
  }
};

}  // namespace farandole
