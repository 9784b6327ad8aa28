// SPDX-License-Identifier: Apache-2.0
// What every rank tells all others at init. The launcher (MPI or a rendezvous server) exchanges these bytes,
// and every rank checks them. Nothing here is secret: the world's key is derived from all of it.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/topology.h"
#include "control/protocol/codec.h"
#include "lib/ipc/unix_socket.h"
#include "lib/net/tcp_socket.h"

namespace farandole {

struct PeerInfo {
  std::string build;     // hash of the core's sources
  std::string job_wide;  // settings; those of rank 0 are used
  int64_t pid = 0;
  uint64_t start_time = 0;  // tells it from a later process with the same number
  uint64_t pid_namespace = 0;
  uint64_t net_namespace = 0;
  std::string boot_id;
  std::string host;      // for messages only, never to tell hosts apart
  std::string listener;  // path of this rank's Unix socket; empty: none, where the rank is alone
  std::string sockets;   // SocketFolder::identity
  TcpAddress tcp;        // its address for other hosts

  ByteString encode() const;
  static PeerInfo decode(ByteView in);
};

PeerInfo own_peer_info(const Config& config, const UnixListener& listener, const TcpAddress& tcp);

// This rank's leader: the lowest of the ranks that MPI places on its host (`node`) and whose sockets it can reach.
// Containers on one machine may have a /tmp each; those with a network of their own count as other hosts, too.
Rank nearest_leader(Rank own, const std::vector<Rank>& node, std::span<const PeerInfo> peer_infos);

// Ranks of a host show it at `listener`, and nowhere else: it proves that they know the world's key.
JobKey proof_at(const std::string& listener, const JobKey& world);

// Where `own` calls `peer`. In another network never at an address that `own` has itself, loopback and a container
// bridge's for example: who listens there is somebody else.
TcpAddress way_to(const PeerInfo& peer, const PeerInfo& own);

// Throws Error(kMismatch) naming the ranks if their builds differ.
void check_agreement(std::span<const PeerInfo> peer_infos);

}  // namespace farandole
