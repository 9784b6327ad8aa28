// SPDX-License-Identifier: Apache-2.0
// Writes flight recorders as JSON, for dumps, for `farandole` commands that attach to a job, and for metrics.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "base/json.h"
#include "lib/ipc/segment.h"
#include "watch/flight_memory.h"

namespace farandole {

// Writes one rank: identity, state, counters and the last `events` events, oldest first, one per line. `reason`: why it
// is written. Works in any process that maps the memory.
void write_flight(Json& json, const FlightMemory& memory, int local, size_t events,
                  const std::string& reason);

// Writes FOLDER/flight-rank-N.json for these local ranks, atomically, for this user only. Throws Error(kLibrary).
void dump_flights(const FlightMemory& memory, std::span<const int> locals,
                  const std::string& folder, const std::string& reason);

// A host's flight recorders, read through a descriptor of their memory, in any process. The writer may be hostile,
// because root may look at others' jobs: every number is checked before use.
class FlightView {
 public:
  // Duplicates `fd`. Throws Error(kInvalidArgument) if it is no such memory, or of a different build.
  explicit FlightView(int fd);

  int local_ranks() const { return memory_.local_ranks(); }
  // Returns JSON. Throws Error(kInvalidArgument) if there is no such local rank.
  std::string text(int local, size_t events) const;
  // Writes the files of all ranks. Throws Error(kLibrary).
  void dump(const std::string& folder, const std::string& reason) const;

 private:
  Segment segment_;
  FlightMemory memory_;
};

}  // namespace farandole
