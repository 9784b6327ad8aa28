// SPDX-License-Identifier: Apache-2.0
// The sockets between the ranks of a host, made at init. They carry memory (file descriptors).
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "base/topology.h"
#include "control/bootstrap/peer_info.h"
#include "lib/ipc/segment.h"
#include "lib/ipc/unix_socket.h"
#include "lib/os/fd.h"

namespace farandole {

// By these a host's leader gives the others memory.
class HostLinks {
 public:
  virtual ~HostLinks() = default;
  // On the leader: creates a segment for this set and sends it to these local ranks, itself excepted. After
  // a failure some of them may have it.
  virtual Segment give(SetId set, const char* label, SegmentSize size,
                       std::span<const int> locals) = 0;
  // On the others: the next segment of this set that the leader gave. Drops those of other sets, which never opened.
  virtual Segment receive(SetId set, Deadline deadline) = 0;
};

// The sockets between a host's leader and its other ranks. They carry descriptors; a closed socket also tells
// that its rank died.
class SocketLinks final : public HostLinks {
 public:
  SocketLinks() = default;
  // Collective over the ranks of this host; returns within the deadline, when every rank has its link.
  // `to_leader`: a connection made earlier, or null to make it here.
  SocketLinks(const Topology& topology, std::span<const PeerInfo> peer_infos,
              UnixListener& listener, const JobKey& key, std::unique_ptr<UnixSocket> to_leader,
              Deadline deadline);

  Segment give(SetId set, const char* label, SegmentSize size,
               std::span<const int> locals) override;
  Segment receive(SetId set, Deadline deadline) override;
  // Collective: exchanges one descriptor of each local rank; returns them by local rank.
  std::vector<Fd> share(int fd, Deadline deadline);
  // Collective: returns when all local ranks have called it.
  void barrier(Deadline deadline);

  bool leads() const { return leads_; }
  // On the leader: its link to a local rank.
  const UnixSocket& member(int local) const { return *members_.at(static_cast<size_t>(local)); }
  const UnixSocket& leader() const { return *leader_; }

 private:
  bool leads_ = true;
  std::vector<std::unique_ptr<UnixSocket>> members_;  // by local rank; null for itself
  std::unique_ptr<UnixSocket> leader_;
};

}  // namespace farandole
