// SPDX-License-Identifier: Apache-2.0
// What ties this rank to the others: sockets and memory on its host, bells, and a leader's links to other hosts.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "control/bootstrap/meeting.h"
#include "control/channel/host_channel.h"
#include "control/channel/shm_channel.h"
#include "control/hosts/host_tree.h"
#include "data/shm/host_arenas.h"
#include "lib/mpi/mpi.h"
#include "runtime/door.h"
#include "runtime/wire_factory.h"

namespace farandole {

class Fabric {
 public:
  // What is between hosts only. The other steps are collective on the host, in this order.
  Fabric(const Config& config, const Topology& topology, std::span<const Card> cards,
         const void* mpi_comm);
  // staging_bytes: of the world.
  void share_memory(UnixListener& listener, std::unique_ptr<UnixSocket> to_leader,
                    std::span<const Card> cards, size_t staging_bytes, Deadline deadline);
  void share_arena(std::shared_ptr<Arena> own, Deadline deadline);
  // The leaders of hosts link up, each with the one above it and those below; all ranks can open wires then.
  void link_hosts(TcpListener listener, std::span<const Card> cards, Deadline deadline);
  // What was said to other hosts last arrives, if it can.
  void finish(Deadline deadline);
  // In a forked child: lets go of the connections, or a rank that dies while its children live would not
  // be missed.
  void forked() { links_ = {}; }

  bool leads() const { return links_.leads(); }  // on its host
  HostLinks& links() { return links_; }
  const OpenWire& open_wire() const { return open_wire_; }
  HostArenas* arenas() const { return arenas_.get(); }  // null: no peer on this host
  HostChannel* hosts() const { return hosts_.get(); }   // of leaders of several hosts only
  const HostTree& tree() const { return tree_; }
  const std::vector<std::string>& host_names() const { return host_names_; }  // by rank
  ShmLayout control() const { return ShmLayout(control_.data(), topology_.local_size()); }
  EventCount& bell() const { return *bells_[static_cast<size_t>(topology_.local_rank)]; }
  const std::vector<EventCount*>& bells() const { return bells_; }  // by local rank
  Segment& flight() { return flight_; }
  Segment take_staging() { return std::move(staging_); }  // of the world

 private:
  void link_leaders(TcpListener& listener, std::span<const Card> cards, Deadline deadline);

  const Config& config_;
  const Topology& topology_;
  std::vector<std::string> host_names_;
  HostLinks links_;
  std::unique_ptr<MpiComm> mpi_;  // null: one host, or no MPI
  Segment control_;
  Segment staging_;
  Segment flight_;
  Segment arena_directory_;
  std::unique_ptr<HostArenas> arenas_;
  std::vector<EventCount*> bells_;
  HostTree tree_;
  std::unique_ptr<HostChannel> hosts_;
  OpenWire open_wire_;  // empty: one host
};

}  // namespace farandole
