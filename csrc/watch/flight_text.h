// SPDX-License-Identifier: Apache-2.0
// The flight recorders as JSON: for dumps, for whoever looks in from outside, for metrics.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "base/json.h"
#include "watch/flight_memory.h"

namespace farandole {

// One rank: who it is, its state, counters and last `events` events, oldest first, a line each.
// `reason`: why anybody looks. Any process that maps the memory.
void write_flight(Json& json, const FlightMemory& memory, int local, size_t events,
                  const std::string& reason);

// Writes FOLDER/flight-rank-N.json for each of these local ranks, whole files only. Throws Error(kLibrary).
void dump_flights(const FlightMemory& memory, std::span<const int> locals,
                  const std::string& folder, const std::string& reason);

}  // namespace farandole
