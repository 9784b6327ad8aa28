// SPDX-License-Identifier: Apache-2.0
// A rank opens these before the bootstrap: its settings, listening sockets and arena; after it, the world's key.
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

// Texts for Python about this process; farandole.h has their form.
std::string text_of_mpi();
std::string text_of_sockets();
// `wanted`: FARANDOLE_INTERFACE. Throws as addresses_of() does.
std::string text_of_addresses(const std::string& wanted);

struct LocalEndpoint {
  Config config;
  JobKey key{};  // of the world, set before probe(): callers of both listeners must prove it
  UnixListener listener;
  TcpListener hosts;
  StackSource stacks;
  std::shared_ptr<Arena> arena;  // shared with peers; arrays in it may outlive the job
  std::unique_ptr<UnixSocket> to_leader;
  explicit LocalEndpoint(Config its_config, StackSource its_stacks = {},
                         std::shared_ptr<Arena> its_arena = std::make_shared<Arena>());
  // The leader of the host that this rank belongs to: the lowest rank whose socket it can reach, or itself.
  // `node`: by rank, the lowest rank of its host according to MPI.
  Rank probe(Rank own, const std::vector<Rank>& node, std::span<const PeerInfo> peer_infos);
  ByteString peer_info() const { return own_peer_info(config, listener, hosts.address()).encode(); }
};

}  // namespace farandole
