// SPDX-License-Identifier: Apache-2.0
// How ranks meet at init: each writes a card, all cards are exchanged by whatever launched the job,
// everybody checks them, and the ranks of a host share memory. Nothing has a name in the file system.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/topology.h"
#include "control/protocol/codec.h"
#include "lib/ipc/segment.h"
#include "lib/ipc/unix_socket.h"
#include "lib/net/tcp_socket.h"
#include "lib/os/fd.h"

namespace farandole {

// What a rank tells all others before they can talk.
struct Card {
  std::string build;        // hash of its sources
  std::string cpu_targets;  // instruction sets that its kernels can run
  std::string job_wide;     // settings; rank 0's hold
  int64_t pid = 0;
  uint64_t start_time = 0;  // tells a later process of the same number apart
  uint64_t pid_namespace = 0;
  uint64_t net_namespace = 0;
  std::string boot_id;
  std::string host;  // its name: for texts, never to tell hosts apart
  std::string door;  // name of this rank's listener
  JobKey key{};      // that it asks for
  TcpAddress tcp;    // where it can be reached from other hosts

  ByteString encode() const;
  static Card decode(ByteView in);
};

Card own_card(const Config& config, const UnixListener& door, const TcpAddress& tcp,
              const JobKey& key);

// The lowest of the ranks that share this rank's node, as MPI has it, and whose sockets and memory can be
// within its reach, as the cards have it: containers on one machine may keep them apart.
Rank nearest_leader(Rank own, const std::vector<Rank>& node, std::span<const Card> cards);

// Throws Error(kMismatch) naming the ranks if builds differ.
void check_agreement(std::span<const Card> cards);

struct ClockOffset {
  int64_t ns = 0;
  int64_t error_ns = 0;  // at most
};

// The sockets between a host's leader and its other ranks. They carry descriptors, and their end is a
// death notice.
class HostLinks {
 public:
  HostLinks() = default;
  // Collective over the ranks of this host, bounded by the deadline: everyone has a link when it returns.
  // to_leader: made before; null: made here.
  HostLinks(const Topology& topology, std::span<const Card> cards, UnixListener& door,
            std::unique_ptr<UnixSocket> to_leader, Deadline deadline);

  // Leader: makes a segment of `bytes` and sends it to these local ranks (itself is skipped).
  Segment give(const char* label, size_t bytes, std::span<const int> locals);
  // Others: the segment that the leader gave, in the order of giving.
  Segment receive(Deadline deadline);
  // Collective: the descriptors that all local ranks bring, by local rank.
  std::vector<Fd> share(int fd, Deadline deadline);
  // This rank's monotonic clock minus the leader's, by the quickest of a few round trips. All local ranks
  // call.
  ClockOffset measure_clock(Deadline deadline);
  // All have come this far.
  void barrier(Deadline deadline);

  bool leads() const { return leads_; }
  // Leader: its link to a local rank.
  const UnixSocket& member(int local) const { return *members_.at(static_cast<size_t>(local)); }
  const UnixSocket& leader() const { return *leader_; }

 private:
  bool leads_ = true;
  std::vector<std::unique_ptr<UnixSocket>> members_;  // by local rank; own is null
  std::unique_ptr<UnixSocket> leader_;
};

}  // namespace farandole
