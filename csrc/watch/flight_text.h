// SPDX-License-Identifier: Apache-2.0
// Writes flight recorders as JSON, for dumps, metrics, and the `farandole` commands that attach to a job.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "base/json.h"
#include "lib/ipc/segment.h"
#include "watch/flight_memory.h"

namespace farandole {

// Writes one rank's recorder: its identity, state and counters, then its last `events` events, oldest first, one per
// line. `reason` tells why the recorder is dumped. May be called from any process that maps the memory.
void write_flight(Json& json, const FlightMemory& memory, int local, size_t events,
                  const std::string& reason);

struct FlightDump {
  std::string name;  // of the file: flight-rank-N.json
  std::string text;
  int64_t made_ns;  // epoch_ns() before the recorder was read
};
std::vector<FlightDump> dumps_of(const FlightMemory& memory, std::span<const int> locals,
                                 const std::string& reason);
// Writes the files to `folder`, atomically. Only this user can read them. Two processes may dump the same recorder; an
// older dump does not replace a newer file. Throws Error(kLibrary).
void write_dumps(const std::vector<FlightDump>& dumps, const std::string& folder);

// The flight recorders of a host, which any process can read through a descriptor of their memory. The writer may be
// hostile, because root may read the recorders of other users. Every number is therefore checked before it is used.
class FlightView {
 public:
  // Duplicates `fd`. Throws Error(kInvalidArgument) if it is not flight memory of this build.
  explicit FlightView(int fd);

  int local_ranks() const { return memory_.local_ranks(); }
  // Throws Error(kInvalidArgument) if there is no such local rank.
  std::string text(int local, size_t events) const;
  // See write_dumps().
  void dump(const std::string& folder, const std::string& reason) const;

 private:
  Segment segment_;
  FlightMemory memory_;
};

}  // namespace farandole
