// SPDX-License-Identifier: Apache-2.0
// The links between the ranks of a host, made at init. They carry shared memory, as file descriptors.
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

// Lets a host's leader give memory to the other ranks. Called by the thread in init(), later by the driver.
class HostLinks {
 public:
  virtual ~HostLinks() = default;
  // Leader only. Creates this set's segment and sends it to these local ranks. If it throws, some may have the segment.
  virtual Segment give(SetId set, const char* label, SegmentSize size,
                       std::span<const int> locals) = 0;
  // Other ranks only. Waits until `deadline` for the set's next segment. Drops segments of sets that never opened.
  virtual Segment receive(SetId set, Deadline deadline) = 0;
};

// Links over Unix sockets between a host's leader and its other ranks. A closed socket shows that a rank has died.
class SocketLinks final : public HostLinks {
 public:
  SocketLinks() = default;
  // All ranks of the host call it. Returns when every rank has its link; throws at the deadline. `to_leader`: an
  // existing connection; null: connects.
  SocketLinks(const Topology& topology, std::span<const PeerInfo> peer_infos,
              UnixListener& listener, const JobKey& key, std::unique_ptr<UnixSocket> to_leader,
              Deadline deadline);

  Segment give(SetId set, const char* label, SegmentSize size,
               std::span<const int> locals) override;
  Segment receive(SetId set, Deadline deadline) override;
  // All ranks of the host call it, each with one descriptor. Returns all descriptors, by local rank.
  std::vector<Fd> share(int fd, Deadline deadline);
  // Returns when all ranks of the host have called it.
  void barrier(Deadline deadline);

  bool leads() const { return leads_; }
  // Leader only. Returns the link to a local rank.
  const UnixSocket& member(int local) const { return *members_.at(static_cast<size_t>(local)); }
  const UnixSocket& leader() const { return *leader_; }

 private:
  bool leads_ = true;
  std::vector<std::unique_ptr<UnixSocket>> members_;  // by local rank; null for this rank
  std::unique_ptr<UnixSocket> leader_;
};

}  // namespace farandole
