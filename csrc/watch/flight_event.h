// SPDX-License-Identifier: Apache-2.0
// One thing that happened to one tensor, bucket or rank: what the flight recorder and the timeline keep.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/types.h"

namespace farandole {

enum class EventKind : uint8_t {
  kSubmit,      // this rank has called
  kNegotiated,  // all have: the log says what comes
  kLaunched,    // a bucket begins to move
  kDone,        // a tensor's result is there; or, without a call, a bucket has moved
  kError,       // a call failed; or, without a call, the job
  kPeerDied,    // `value` is its rank
  // The timeline's only; `value` is how long it took, in nanoseconds.
  kWait,     // a caller was blocked
  kStage,    // one block of a bucket: own input for the peers
  kReduce,   // ... everybody's input into a result
  kConsume,  // ... results into own output
  kCycle,    // the driver has read a batch of the log
};
const char* name_of(EventKind kind);

constexpr size_t kRecordedDimensions = 7;

struct FlightEvent {
  int64_t time_ns = 0;  // CLOCK_MONOTONIC; when it began, if it took time
  int64_t call = 0;     // the handle; 0: none
  uint64_t bytes = 0;
  uint64_t sequence =
      0;  // submit: of unnamed calls in the set. negotiated: the log's, alike on all ranks
  uint64_t bucket = 0;  // of the set, from 1; 0: it needs none
  int64_t value = 0;    // as its kind says; error: the code
  uint32_t name = 0;    // a label of Labels
  SetId set = 0;
  uint32_t thread = 0;
  EventKind kind = EventKind::kSubmit;
  uint8_t op = 0;
  uint8_t dtype = 0;
  uint8_t dimensions = 0;  // of the tensor; more than fit below are known by their number only
  int64_t shape[kRecordedDimensions] = {};

  size_t bytes_used() const {
    const size_t fit = dimensions < kRecordedDimensions ? dimensions : kRecordedDimensions;
    return offsetof(FlightEvent, shape) + fit * sizeof(int64_t);
  }
};
static_assert(sizeof(FlightEvent) == 120);  // with its stamp: two cache lines

}  // namespace farandole
