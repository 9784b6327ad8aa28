// SPDX-License-Identifier: Apache-2.0
// Writes flight recorders as JSON: for dumps, for `farandole` commands that attach to a job, for metrics.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "base/json.h"
#include "lib/ipc/segment.h"
#include "watch/flight_memory.h"

namespace farandole {

// One rank: identity, state, counters and the last `events` events, oldest first, one a line. `reason`: why
// it is written. In any process that maps the memory.
void write_flight(Json& json, const FlightMemory& memory, int local, size_t events,
                  const std::string& reason);

// Writes FOLDER/flight-rank-N.json for each of these local ranks, atomically; only this user may read them. Throws
// Error(kLibrary).
void dump_flights(const FlightMemory& memory, std::span<const int> locals,
                  const std::string& folder, const std::string& reason);

// The flight recorders of a host's ranks, read through a descriptor of their memory, in any process. The writer may be
// hostile, for root may look at jobs of others: every number read from the memory is checked before it is used.
class FlightView {
 public:
  // Duplicates `fd`. Throws Error(kInvalidArgument) if it is no such memory, or of another build.
  explicit FlightView(int fd);

  int local_ranks() const { return memory_.local_ranks(); }
  // JSON. Throws Error(kInvalidArgument) if there is no such local rank.
  std::string text(int local, size_t events) const;
  // Writes the files of all ranks. Throws Error(kLibrary).
  void dump(const std::string& folder, const std::string& reason) const;

 private:
  Segment segment_;
  FlightMemory memory_;
};

}  // namespace farandole
