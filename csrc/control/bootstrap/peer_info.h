// SPDX-License-Identifier: Apache-2.0
// Data that every rank gives all others at init. The launcher (MPI or a rendezvous server) exchanges the bytes, and
// every rank checks them. None is secret: the world's key is derived from all of them and a secret.
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
  uint64_t start_time = 0;  // distinguishes the process from a later one with this number
  uint64_t pid_namespace = 0;
  uint64_t net_namespace = 0;
  std::string boot_id;
  std::string host;      // for messages only, never to compare hosts
  std::string listener;  // path of this rank's Unix socket; empty if it is alone
  std::string sockets;   // SocketFolder::identity
  TcpAddress tcp;        // for other hosts

  ByteString encode() const;
  static PeerInfo decode(ByteView in);
};

PeerInfo own_peer_info(const Config& config, const UnixListener& listener, const TcpAddress& tcp);

// Leader of this rank: the lowest of the ranks that MPI places on its host (`node`) and whose sockets it can reach.
// Containers may have separate /tmp folders or networks; those count as different hosts.
Rank nearest_leader(Rank own, const std::vector<Rank>& node, std::span<const PeerInfo> peer_infos);

// Proof that a rank knows the world's key. Ranks of a host show it at `listener` only.
JobKey proof_at(const std::string& listener, const JobKey& world);

// Addresses at which `own` calls `peer`. In a different network they exclude those that `own` has itself (loopback, a
// container bridge): somebody else listens there.
TcpAddress way_to(const PeerInfo& peer, const PeerInfo& own);

// Throws Error(kMismatch) with the ranks if their builds differ.
void check_agreement(std::span<const PeerInfo> peer_infos);

}  // namespace farandole
