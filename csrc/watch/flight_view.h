// SPDX-License-Identifier: Apache-2.0
// A look at the flight recorders of a host's ranks through a descriptor of their memory, from any process
// of the same user.
#pragma once

#include <string>

#include "lib/ipc/segment.h"
#include "watch/flight_memory.h"

namespace farandole {

class FlightView {
 public:
  // Borrows `fd`. Throws Error(kInvalidArgument) if it is no such memory, or another build's.
  explicit FlightView(int fd);

  int local_ranks() const { return memory_.local_ranks(); }
  // JSON; throws Error(kInvalidArgument) if there is no such local rank.
  std::string text(int local, size_t events) const;
  // Writes all ranks' files. Throws Error(kLibrary).
  void dump(const std::string& folder, const std::string& reason) const;

 private:
  Segment segment_;
  FlightMemory memory_;
};

}  // namespace farandole
