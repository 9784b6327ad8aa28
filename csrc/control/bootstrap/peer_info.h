// SPDX-License-Identifier: Apache-2.0
// The data that every rank sends to all others at init, through MPI or a rendezvous server. Every rank checks all data.
// They are not secret: the world's key is derived from all of them and a secret.
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
  std::string job_wide;  // job_wide_text(); all ranks use that of rank 0
  int64_t pid = 0;
  uint64_t start_time = 0;  // distinguishes the process from a later one with the same pid
  uint64_t pid_namespace = 0;
  uint64_t net_namespace = 0;
  std::string boot_id;
  std::string host;      // name for messages to users; not unique
  std::string listener;  // path of this rank's Unix socket; empty if the rank is alone
  std::string sockets;   // SocketFolder::identity
  TcpAddress tcp;        // for other hosts

  ByteString encode() const;
  static PeerInfo decode(ByteView in);
};

PeerInfo own_peer_info(const Config& config, const UnixListener& listener, const TcpAddress& tcp);

// Returns this rank's leader: the lowest rank that MPI places on the same host (`node`) and whose sockets this rank can
// reach. Containers with separate /tmp folders or networks count as different hosts.
Rank nearest_leader(Rank own, const std::vector<Rank>& node, std::span<const PeerInfo> peer_infos);

// Proof that a rank knows the world's key. A rank sends it only to the Unix socket `listener`.
JobKey proof_at(const std::string& listener, const JobKey& world);

// Addresses at which `own` connects to `peer`. If `peer` is in a different network namespace, omits addresses that
// `own` also has (loopback, a container bridge), because the peer does not listen there.
TcpAddress way_to(const PeerInfo& peer, const PeerInfo& own);

// Throws Error(kMismatch), which names the ranks, if builds differ.
void check_agreement(std::span<const PeerInfo> peer_infos);

}  // namespace farandole
