// SPDX-License-Identifier: Apache-2.0
// The flight recorders of a host's ranks, in one segment that all of them map: whoever lives can read what
// a dead rank did last. Processes outside attach to it through /proc/PID/fd.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/types.h"
#include "watch/flight_event.h"
#include "watch/labels.h"
#include "watch/stamped.h"
#include "watch/tally.h"

namespace farandole {

enum class LifeState : uint32_t { kRunning, kLeft, kFailed, kDied };
const char* name_of(LifeState state);

struct FlightFailure {
  static constexpr size_t kTextBytes = 1016;
  int32_t code;
  uint32_t length;
  char text[kTextBytes];
};

// Of one rank. Zeroed memory is a rank that has done nothing.
struct FlightPage {
  static constexpr size_t kEvents = 4096;
  static constexpr size_t kSets = 64;  // process sets whose ranks are kept
  struct Identity {
    int32_t rank;
    int32_t size;
    int64_t pid;
    uint64_t start_time;     // of the process: tells a later one of the same number apart
    int64_t began_ns;        // init()
    int64_t clock_ns;        // this rank's monotonic clock minus that of the host's first rank
    int64_t clock_error_ns;  // at most
  };
  Stamped<Identity> identity;
  std::atomic<LifeState> state;
  std::atomic<uint64_t> recorded;     // events; the last kEvents of them are here
  std::atomic<uint64_t> dropped;      // writers that met in one slot
  Stamped<FlightFailure> failure;     // the last one
  std::atomic<uint64_t> sets[kSets];  // id << 32 | label of its ranks; 0: free
  Tally tally;
  Stamped<FlightEvent> events[kEvents];
  LabelMemory labels;
};

class FlightMemory {
 public:
  // Zeroed memory is prepared by prepare(); a foreign process checks by fits().
  FlightMemory(std::byte* memory, size_t bytes) : memory_(memory), bytes_(bytes) {}
  static size_t bytes_needed(int local_ranks, int ranks);

  void prepare(int local_ranks, int ranks);
  // Whether this is such memory, of this very layout.
  bool fits() const;
  int local_ranks() const { return header().local_ranks; }
  int ranks() const { return header().ranks; }
  FlightPage& page(int local) const;
  Lateness& lateness(Rank rank) const;

 private:
  struct Header {
    uint64_t magic;
    int32_t local_ranks;
    int32_t ranks;
  };
  Header& header() const { return *reinterpret_cast<Header*>(memory_); }
  static size_t pages_begin(int ranks);

  std::byte* memory_;
  size_t bytes_;
};

}  // namespace farandole
