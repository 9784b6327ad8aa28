// SPDX-License-Identifier: Apache-2.0
// Chooses the transport between hosts by FARANDOLE_WIRE or, on auto, by how the job was started. A new
// transport is a row in wire_factory.cc.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
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

// This rank's end of a transport with addresses of its own, opened before the ranks know one another.
struct WireEnd {
  virtual ~WireEnd() = default;
  virtual std::string address() const = 0;  // told to all ranks: PeerInfo::wires
};
using WireEnds = std::map<std::string, std::shared_ptr<WireEnd>>;  // by the transport's name
WireEnds open_wire_ends(const Config& config);

// What a transport may use to meet the others.
struct WireContext {
  const Config& config;
  Rank own;
  std::span<const PeerInfo> peer_infos;
  TcpListener listener;
  WireEnds ends;
  MpiComm* mpi;                                // null: the job has none; it outlives the wires,
  const std::vector<std::string>& host_names;  // as these do
};

// Throws Error(kLibrary) for a transport that is not available here; the config has refused unknown ones.
OpenWire wire_factory(WireContext context);

}  // namespace farandole
