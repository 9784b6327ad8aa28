// SPDX-License-Identifier: Apache-2.0
// The links between the ranks of a host, which are made in init(). They carry shared memory as file descriptors.
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

// Lets the leader of a host give memory to the other ranks. Called by the thread in init(), and later by the driver.
class HostLinks {
 public:
  virtual ~HostLinks() = default;
  // For the leader only. Creates this set's segment and sends it to these local ranks. If this function throws, some of
  // these ranks may already have the segment.
  virtual Segment give(SetId set, const char* label, SegmentSize size,
                       std::span<const int> locals) = 0;
  // For other ranks. Waits until `deadline` for the set's next segment. Drops the segments of sets that never opened.
  virtual Segment receive(SetId set, Deadline deadline) = 0;
};

// Links over Unix sockets between the leader of a host and its other ranks. A rank has died if its socket is closed.
class SocketLinks final : public HostLinks {
 public:
  SocketLinks() = default;
  // All ranks of the host must call this constructor. It returns when every rank has its link, and throws at the
  // deadline. `to_leader` is an existing connection to the leader. If it is null, the constructor connects.
  SocketLinks(const Topology& topology, std::span<const PeerInfo> peer_infos,
              UnixListener& listener, const JobKey& key, std::unique_ptr<UnixSocket> to_leader,
              Deadline deadline);

  Segment give(SetId set, const char* label, SegmentSize size,
               std::span<const int> locals) override;
  Segment receive(SetId set, Deadline deadline) override;
  // All ranks of the host must call this function, each with one descriptor. Returns all descriptors, by local rank.
  std::vector<Fd> share(int fd, Deadline deadline);
  // Returns when all ranks of the host have called this function.
  void barrier(Deadline deadline);

  bool leads() const { return leads_; }
  // For the leader only. Returns the link to a local rank.
  const UnixSocket& member(int local) const { return *members_.at(static_cast<size_t>(local)); }
  const UnixSocket& leader() const { return *leader_; }

 private:
  bool leads_ = true;
  std::vector<std::unique_ptr<UnixSocket>> members_;  // by local rank; null for this rank
  std::unique_ptr<UnixSocket> leader_;
};

}  // namespace farandole
