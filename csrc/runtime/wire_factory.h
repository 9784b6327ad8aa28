// SPDX-License-Identifier: Apache-2.0
// Chooses the transport between hosts by FARANDOLE_WIRE or, on auto, by how the job was started. A new
// transport is added here.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/config.h"
#include "control/bootstrap/peer_info.h"
#include "data/hierarchical/wire.h"
#include "lib/mpi/mpi.h"

namespace farandole {

// Opens a wire between these ranks. `number`: equal on all members, never used for another wire of the job.
using OpenWire =
    std::function<std::unique_ptr<Wire>(const std::vector<Rank>& ranks, uint64_t number)>;

// `mpi`: null if the job has none; it and `host_names` must outlive the wires. Throws Error(kLibrary) for a
// transport that is not available here; the config has refused unknown ones.
OpenWire wire_factory(const Config& config, Rank own, std::span<const PeerInfo> peer_infos,
                      TcpListener listener, MpiComm* mpi,
                      const std::vector<std::string>& host_names);

}  // namespace farandole
