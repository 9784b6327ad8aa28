// SPDX-License-Identifier: Apache-2.0
// Which transport carries messages between hosts: FARANDOLE_WIRE says, or what the job was started by. A new
// transport is a row here.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/config.h"
#include "control/bootstrap/meeting.h"
#include "data/hierarchical/wire.h"
#include "lib/mpi/mpi.h"

namespace farandole {

// Opens a wire between these ranks. number: its own for ever among those of the job, and alike on all members.
using OpenWire =
    std::function<std::unique_ptr<Wire>(const std::vector<Rank>& ranks, uint64_t number)>;

// mpi: null: the job has none; outlives the wires, as host_names does. Throws Error(kInvalidArgument) for a
// transport that does not exist, kLibrary for one that can't be had here.
OpenWire wire_factory(const Config& config, Rank own, std::span<const Card> cards,
                      TcpListener listener, MpiComm* mpi,
                      const std::vector<std::string>& host_names);

}  // namespace farandole
