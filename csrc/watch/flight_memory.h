// SPDX-License-Identifier: Apache-2.0
// The flight recorders of a host's ranks, in one segment that all map, so that the living can read a dead
// rank's last events. Other processes attach to it through /proc/PID/fd.
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

struct FlightText {
  static constexpr size_t kBytes = 8184;
  uint64_t length;
  char text[kBytes];
};

// One rank's page. Zeroed memory is a rank that has done nothing.
struct FlightPage {
  static constexpr size_t kEvents = 4096;
  static constexpr size_t kSets = 64;  // process sets whose ranks are stored
  static constexpr size_t kOpen = 1024;
  struct Identity {
    int32_t rank;
    int32_t size;
    int32_t world;  // its number in the job's life
    int64_t pid;
    uint64_t start_time;     // of the process; tells it from a later one with the same number
    int64_t began_ns;        // time of init()
    int64_t clock_ns;        // this rank's monotonic clock minus that of the host's first rank
    int64_t clock_error_ns;  // at most
  };
  Stamped<Identity> identity;
  std::atomic<LifeState> state;
  std::atomic<uint64_t> recorded;  // number of events; the last kEvents are stored
  std::atomic<uint64_t> dropped;   // events lost because two writers met in one slot
  Stamped<FlightFailure> failure;  // the last one
  Stamped<FlightText> story;       // of the worlds before this one
  Stamped<FlightText> findings;    // a line for each thing that looks wrong, though nothing failed
  std::atomic<uint64_t> sets[kSets];  // id << 32 | label of the ranks; 0: unused
  Tally tally;
  Stamped<FlightEvent> events[kEvents];
  // Calls that are open, though the ring may have lost them: their handles (0: none), and what is known.
  std::atomic<int64_t> open[kOpen];
  Stamped<OpenCall> open_calls[kOpen];
  LabelMemory labels;
};

class FlightMemory {
 public:
  // The leader prepares zeroed memory with prepare(); other processes check it with fits().
  FlightMemory(std::byte* memory, size_t bytes) : memory_(memory), bytes_(bytes) {}
  static size_t bytes_needed(int local_ranks, int ranks);

  void prepare(int local_ranks, int ranks);
  // Whether this is such memory, written by the same build.
  bool fits() const;
  int local_ranks() const { return header().local_ranks; }
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
