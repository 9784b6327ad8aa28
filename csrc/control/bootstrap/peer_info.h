// SPDX-License-Identifier: Apache-2.0
// The data that every rank sends to all other ranks in init(), through MPI or a rendezvous server. Every rank checks
// all of the data. They are not secret: the key of the world is derived from these data and from a secret.
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
  std::string job_wide;  // from job_wide_text(); all ranks use the text of rank 0
  int64_t pid = 0;
  uint64_t start_time = 0;  // distinguishes the process from a later process with the same pid
  uint64_t pid_namespace = 0;
  uint64_t net_namespace = 0;
  std::string boot_id;
  std::string host;      // name that is shown to users; not unique
  std::string listener;  // path of this rank's Unix socket, or "" if the rank is alone
  std::string sockets;   // SocketFolder::identity
  TcpAddress tcp;        // address for ranks of other hosts

  ByteString encode() const;
  static PeerInfo decode(ByteView in);
};

PeerInfo own_peer_info(const Config& config, const UnixListener& listener, const TcpAddress& tcp);

// Returns this rank's leader: the lowest rank that MPI places on the same host (`node`) and whose sockets this rank can
// reach. Containers with separate /tmp folders or separate networks count as different hosts.
Rank nearest_leader(Rank own, const std::vector<Rank>& node, std::span<const PeerInfo> peer_infos);

// Proves that a rank knows the world's key. A rank sends this proof only to the Unix socket `listener`.
JobKey proof_at(const std::string& listener, const JobKey& world);

// Returns the addresses at which `own` connects to `peer`. If `peer` is in a different network namespace, omits
// addresses that `own` also has (such as loopback or a container bridge), because they do not lead to the peer.
TcpAddress way_to(const PeerInfo& peer, const PeerInfo& own);

// If the builds differ, throws Error(kMismatch) with a text that names the ranks.
void check_agreement(std::span<const PeerInfo> peer_infos);

}  // namespace farandole
