// SPDX-License-Identifier: Apache-2.0
// One event of a tensor, bucket or rank, as the flight recorder and the timeline store it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/types.h"

namespace farandole {

enum class EventKind : uint8_t {
  kSubmit,      // this rank has submitted a call
  kNegotiated,  // all ranks have; its log entry was read
  kLaunched,    // a bucket begins to move
  kDone,        // a tensor's result is there; without a call: a bucket has moved
  kError,       // a call failed; without a call: the job
  kPeerDied,    // `value`: the rank
  // Found in a call's tensor, at element `sequence`.
  kWireFault,   // `value`: the rank that sent them
  kAuditFault,  // `value`: the rank that made the result
  // For the timeline only; `value`: duration in nanoseconds.
  kWait,     // a caller was blocked
  kStage,    // a block's phase: own input made accessible to peers
  kReduce,   // ... all inputs reduced to a result
  kConsume,  // ... results copied to own output
  kCycle,    // the driver has read a batch of log entries
};
const char* name_of(EventKind kind);

constexpr size_t kRecordedDimensions = 6;

struct FlightEvent {
  int64_t time_ns = 0;  // CLOCK_MONOTONIC; the beginning, if it has a duration
  int64_t call = 0;     // the handle; 0: none
  uint64_t bytes = 0;
  uint64_t sequence = 0;  // submit: number of an unnamed call. negotiated: position in the log
  uint64_t bucket = 0;    // of the set, from 1; 0: none. submit of a message's end: its tag
  int64_t value = 0;      // depends on `kind`; error: the code; submit of a message's end: the peer
  uint32_t name = 0;      // see Labels
  SetId set = 0;
  uint32_t thread = 0;
  EventKind kind = EventKind::kSubmit;
  uint8_t op = 0;
  uint8_t dtype = 0;
  uint8_t dimensions = 0;  // of the tensor; only the first kRecordedDimensions are stored
  uint32_t site = 0;       // of a submit: the line that makes it, see Labels
  int64_t shape[kRecordedDimensions] = {};

  size_t bytes_used() const {
    const size_t fit = dimensions < kRecordedDimensions ? dimensions : kRecordedDimensions;
    return offsetof(FlightEvent, shape) + fit * sizeof(int64_t);
  }
};
static_assert(sizeof(FlightEvent) == 120);  // with its stamp: two cache lines

// A call that is submitted and neither done nor failed.
struct OpenCall {
  uint64_t position = 0;      // in the log; 0: not all ranks have submitted it
  uint64_t bucket = 0;        // known with it
  int64_t negotiated_ns = 0;  // likewise
  int64_t lane = 0;           // likewise: the set whose bucket it is
  FlightEvent submit;
};

}  // namespace farandole
