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

// A host's leader gives memory to the other ranks. The thread of init() uses it first, later the driver.
class HostLinks {
 public:
  virtual ~HostLinks() = default;
  // Leader only. Creates a segment for this set and sends it to these local ranks; after a failure some may have it.
  virtual Segment give(SetId set, const char* label, SegmentSize size,
                       std::span<const int> locals) = 0;
  // Other ranks only. Blocks until `deadline` for the set's next segment; drops those of sets that never opened.
  virtual Segment receive(SetId set, Deadline deadline) = 0;
};

// Links over sockets between a host's leader and its other ranks. A closed socket also reports a death.
class SocketLinks final : public HostLinks {
 public:
  SocketLinks() = default;
  // Collective over the ranks of this host. Returns within the deadline, when every rank has its link. `to_leader`:
  // an earlier connection, or null to connect here.
  SocketLinks(const Topology& topology, std::span<const PeerInfo> peer_infos,
              UnixListener& listener, const JobKey& key, std::unique_ptr<UnixSocket> to_leader,
              Deadline deadline);

  Segment give(SetId set, const char* label, SegmentSize size,
               std::span<const int> locals) override;
  Segment receive(SetId set, Deadline deadline) override;
  // Collective. Exchanges one descriptor of each local rank; returns them by local rank.
  std::vector<Fd> share(int fd, Deadline deadline);
  // Collective. Returns when all local ranks have called it.
  void barrier(Deadline deadline);

  bool leads() const { return leads_; }
  // Leader only: its link to a local rank.
  const UnixSocket& member(int local) const { return *members_.at(static_cast<size_t>(local)); }
  const UnixSocket& leader() const { return *leader_; }

 private:
  bool leads_ = true;
  std::vector<std::unique_ptr<UnixSocket>> members_;  // by local rank; null for itself
  std::unique_ptr<UnixSocket> leader_;
};

}  // namespace farandole
