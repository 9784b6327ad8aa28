// SPDX-License-Identifier: Apache-2.0
// A rank's settings, listening sockets and arena, opened before the bootstrap, and the world's key, set after the
// bootstrap.
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

// Texts about this process; farandole.h defines their form.
std::string text_of_mpi();
std::string text_of_sockets();
// `wanted`: FARANDOLE_INTERFACE. Throws like addresses_of().
std::string text_of_addresses(const std::string& wanted);

struct LocalEndpoint {
  Config config;
  JobKey key{};  // the world's key, set before probe(); callers of both listeners must know it
  UnixListener listener;
  TcpListener hosts;
  StackSource stacks;
  std::shared_ptr<Arena> arena;  // shared with peers; its arrays may outlive the job
  std::unique_ptr<UnixSocket> to_leader;
  explicit LocalEndpoint(Config its_config, StackSource its_stacks = {},
                         std::shared_ptr<Arena> its_arena = std::make_shared<Arena>());
  // Returns this rank's leader: the lowest rank whose socket it can reach. `node`: lowest rank on each rank's host, as
  // MPI says.
  Rank probe(Rank own, const std::vector<Rank>& node, std::span<const PeerInfo> peer_infos);
  ByteString peer_info() const { return own_peer_info(config, listener, hosts.address()).encode(); }
};

}  // namespace farandole
