// SPDX-License-Identifier: Apache-2.0
// Holds a rank's settings, listening sockets and arena, which the rank opens before the bootstrap. After the bootstrap,
// it also holds the world's key.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/config.h"
#include "control/bootstrap/peer_info.h"
#include "lib/ipc/arena.h"
#include "watch/stack_reporter.h"

namespace farandole {

// These functions return texts about this process. farandole.h defines their format.
std::string text_of_mpi();
std::string text_of_sockets();
// `wanted` is the value of FARANDOLE_INTERFACE. Throws the same errors as addresses_of().
std::string text_of_addresses(const std::string& wanted);

struct LocalEndpoint {
  Config config;
  JobKey key{};  // the world's key, set before probe(); peers must prove that they know it
  UnixListener listener;
  TcpListener hosts;
  StackSource stacks;
  std::shared_ptr<Arena> arena;  // shared with peers; its arrays may outlive the job
  std::unique_ptr<UnixSocket> to_leader;
  explicit LocalEndpoint(Config its_config, StackSource its_stacks = {},
                         std::shared_ptr<Arena> its_arena = std::make_shared<Arena>());
  // Returns this rank's leader: the lowest rank whose socket this rank can reach. `node` holds, for each rank, the
  // lowest rank on the same host according to MPI.
  Rank probe(Rank own, const std::vector<Rank>& node, std::span<const PeerInfo> peer_infos);
  ByteString peer_info() const { return own_peer_info(config, listener, hosts.address()).encode(); }
};

}  // namespace farandole
