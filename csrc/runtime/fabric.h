// SPDX-License-Identifier: Apache-2.0
// This rank's connections: sockets and shared memory on its host, event counts, and links to other hosts.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "control/bootstrap/host_links.h"
#include "control/channel/host_channel.h"
#include "control/channel/shm_channel.h"
#include "control/hosts/host_tree.h"
#include "data/hierarchical/wire.h"
#include "data/shm/host_arenas.h"
#include "lib/mpi/mpi.h"
#include "lib/os/poller.h"
#include "runtime/local_endpoint.h"

namespace farandole {

// Opens a wire between these ranks. `number` must be the same on all of them, and no other wire of the job may use it.
using OpenWire =
    std::function<std::unique_ptr<Wire>(const std::vector<Rank>& ranks, uint64_t number)>;

class Fabric {
 public:
  // Does not open connections. Afterwards, all ranks of a host must call the next three functions in this order.
  Fabric(const Config& config, const Topology& topology, std::span<const PeerInfo> peer_infos,
         const JobKey& key, const void* mpi_comm);
  // `staging` is the size of the memory for the world. Closes the listener when the host's ranks are connected.
  void share_memory(UnixListener listener, std::unique_ptr<UnixSocket> to_leader,
                    std::span<const PeerInfo> peer_infos, SegmentSize staging, Deadline deadline);
  void share_arena(std::shared_ptr<Arena> own, Deadline deadline);
  // Links each leader with its parent and children in the HostTree. Afterwards all ranks can open wires. Throws
  // Error(kLibrary) if the transport in FARANDOLE_WIRE is not available.
  void link_hosts(TcpListener listener, std::span<const PeerInfo> peer_infos, Deadline deadline);
  // Used by simulations: the argument of use(), which replaces the three functions above.
  struct Parts {
    Segment control, staging, flight;
    std::unique_ptr<HostLinks> links;
    std::unique_ptr<HostChannel> hosts;
    HostTree tree;
    OpenWire open_wire;
  };
  void use(Parts parts);
  // Sends messages that are still queued for other hosts. Stops at the deadline.
  void finish(Deadline deadline);

  bool leads() const { return topology_.local_rank == 0; }
  HostLinks& links() { return given_ ? *given_ : sockets_; }
  SocketLinks& sockets() { return sockets_; }
  const OpenWire& open_wire() const { return open_wire_; }
  HostArenas* arenas() const { return arenas_.get(); }  // null if the rank is alone on its host
  // Null unless this rank leads its host in a job of several hosts.
  HostChannel* hosts() const { return hosts_.get(); }
  const HostTree& tree() const { return tree_; }
  const std::vector<std::string>& host_names() const { return host_names_; }  // indexed by rank
  ShmLayout control() const { return ShmLayout(control_.data(), topology_.local_size(), bells_); }
  Wakeup wakeup() const { return control().wakeup(topology_.local_rank); }
  Poller* poller() const { return poller_.get(); }  // null if no other host can send to this rank
  Segment& flight() { return flight_; }
  Segment take_staging() { return std::move(staging_); }  // memory for the world's set

 private:
  void share_bells(Deadline deadline);
  // Throws Error(kPeer) that names leaders that did not connect, or Error(kLibrary) that names leaders without sockets.
  void link_leaders(TcpListener& listener, std::span<const PeerInfo> peer_infos, Deadline deadline);
  std::chrono::milliseconds peer_timeout() const;
  // Returns an empty function if the job has no MPI and FARANDOLE_WIRE allows a different transport.
  OpenWire by_mpi() const;
  OpenWire by_tcp(TcpListener listener, std::span<const PeerInfo> peer_infos) const;

  const Config& config_;
  const Topology& topology_;
  const JobKey key_;  // the world's key
  std::vector<std::string> host_names_;
  SocketLinks sockets_;
  std::unique_ptr<HostLinks> given_;  // null if sockets_ is used
  std::unique_ptr<MpiComm> mpi_;      // null if there is only one host, or no MPI
  Segment control_;
  Segment staging_;
  Segment flight_;
  Segment arena_directory_;
  std::unique_ptr<HostArenas> arenas_;
  std::unique_ptr<Poller> poller_;
  std::array<std::vector<Fd>, Poller::kBells> rung_;  // bells of the other ranks, by local rank
  std::vector<Bells> bells_;  // indexed by local rank; empty if there is only one host
  HostTree tree_;
  std::unique_ptr<HostChannel> hosts_;
  OpenWire open_wire_;  // empty if there is only one host
};

}  // namespace farandole
