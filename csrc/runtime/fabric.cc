// SPDX-License-Identifier: Apache-2.0
#include "runtime/fabric.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "data/hierarchical/mpi_wire.h"
#include "data/hierarchical/tcp_wire.h"
#include "watch/flight_memory.h"

namespace farandole {
namespace {

void check_sockets(Rank own, Rank parent, std::vector<Rank> needed,
                   std::span<const PeerInfo> peer_infos) {
  needed.push_back(own);
  if (parent >= 0) needed.push_back(parent);
  std::erase_if(needed,
                [&](Rank rank) { return peer_infos[static_cast<size_t>(rank)].tcp.port != 0; });
  if (needed.empty()) return;
  std::ranges::sort(needed);
  throw Error(
      ErrorCode::kLibrary,
      "the ranks are on several hosts, but " + text_of_ranks(needed) +
          " can't open a TCP socket, and hosts exchange control messages over TCP; allow sockets "
          "there (container or sandbox settings)");
}

}  // namespace

Fabric::Fabric(const Config& config, const Topology& topology, std::span<const PeerInfo> peer_infos,
               const JobKey& key, const void* mpi_comm)
    : config_(config), topology_(topology), key_(key) {
  if (topology_.local_size() < topology_.size && mpi_comm != nullptr && config_.wire != "tcp") {
    mpi_ = MpiComm::borrow(mpi_comm);
  }
  for (const PeerInfo& peer_info : peer_infos) host_names_.push_back(peer_info.host);
}

void Fabric::share_memory(UnixListener listener, std::unique_ptr<UnixSocket> to_leader,
                          std::span<const PeerInfo> peer_infos, SegmentSize staging,
                          Deadline deadline) {
  sockets_ = SocketLinks(topology_, peer_infos, listener, key_, std::move(to_leader), deadline);
  const int ranks = topology_.local_size();
  const auto segment = [&](const char* name, SegmentSize bytes) {
    return leads() ? sockets_.give(kWorldSet, name, bytes, numbers_below(ranks))
                   : sockets_.receive(kWorldSet, deadline);
  };
  control_ = segment("farandole-control", ShmLayout::bytes_needed(ranks));
  staging_ = segment("farandole-staging", staging);
  flight_ = segment("farandole-flight", FlightMemory::bytes_needed(ranks, topology_.size));
  // This is not a race: the other ranks use this memory only after share_arena().
  if (leads()) FlightMemory(flight_.data(), ranks, topology_.size).prepare();
}

void Fabric::share_arena(std::shared_ptr<Arena> own, Deadline deadline) {
  const int ranks = topology_.local_size();
  if (ranks == 1) return;
  arena_directory_ = leads()
                         ? sockets_.give(kWorldSet, "farandole-arenas",
                                         ArenaDirectory::bytes_needed(ranks), numbers_below(ranks))
                         : sockets_.receive(kWorldSet, deadline);
  std::vector<Fd> fds = sockets_.share(own->fd(), deadline);
  arenas_ = std::make_unique<HostArenas>(std::move(own), topology_.local_rank, std::move(fds),
                                         ArenaDirectory(arena_directory_.data(), ranks));
}

// Must be called by all ranks of the host.
void Fabric::share_bells(Deadline deadline) {
  poller_ = std::make_unique<Poller>();
  bells_.resize(static_cast<size_t>(topology_.local_size()));
  for (const Poller::Bell bell : {Poller::kDriver, Poller::kOther}) {
    if (topology_.local_size() > 1) rung_[bell] = sockets_.share(poller_->bell(bell), deadline);
    for (size_t local = 0; local < rung_[bell].size(); ++local) {
      bells_[local].fds[bell] = rung_[bell][local].get();
    }
    const auto own = static_cast<size_t>(topology_.local_rank);
    if (!rung_[bell].empty()) rung_[bell][own].reset();
    bells_[own].fds[bell] = poller_->bell(bell);
  }
  bells_[static_cast<size_t>(topology_.local_rank)].poller = poller_.get();
}

// "auto" prefers MPI if the job has it, because MPI can use faster networks than TCP.
void Fabric::link_hosts(TcpListener listener, std::span<const PeerInfo> peer_infos,
                        Deadline deadline) {
  if (topology_.local_size() == topology_.size) return;
  share_bells(deadline);
  if (leads()) link_leaders(listener, peer_infos, deadline);
  if (config_.wire != "tcp") open_wire_ = by_mpi();
  if (!open_wire_) open_wire_ = by_tcp(std::move(listener), peer_infos);
}

OpenWire Fabric::by_mpi() const {
  if (mpi_) {
    return [this](const std::vector<Rank>& ranks, uint64_t number) {
      return std::make_unique<MpiWire>(*mpi_, ranks, host_names_, number);
    };
  }
  if (config_.wire == "auto") return {};
  throw Error(ErrorCode::kLibrary,
              "FARANDOLE_WIRE=mpi, but the job has no MPI: start the job by mpirun, mpiexec or "
              "srun, with mpi4py installed");
}

OpenWire Fabric::by_tcp(TcpListener listener, std::span<const PeerInfo> peer_infos) const {
  auto ends = std::make_shared<TcpEnds>(
      TcpEnds{topology_.rank, key_, std::move(listener), {}, host_names_, {}});
  ends->timeout = peer_timeout();
  ends->poller = poller_.get();
  std::vector<Rank> mute;
  for (const PeerInfo& peer_info : peer_infos) {
    if (peer_info.tcp.port == 0) mute.push_back(static_cast<Rank>(ends->addresses.size()));
    ends->addresses.push_back(way_to(peer_info, peer_infos[static_cast<size_t>(topology_.rank)]));
  }
  if (mute.empty()) {
    return [ends](const std::vector<Rank>& ranks, uint64_t number) {
      return std::make_unique<TcpWire>(ends, ranks, number);
    };
  }
  throw Error(ErrorCode::kLibrary,
              "the ranks are on several hosts, but " + text_of_ranks(mute) +
                  " can't open a TCP socket, and hosts exchange inputs over TCP; allow "
                  "sockets there (container or sandbox settings), or start the job by mpirun, "
                  "mpiexec or srun, with mpi4py installed and without FARANDOLE_WIRE=tcp");
}

std::chrono::milliseconds Fabric::peer_timeout() const {
  return std::chrono::duration_cast<std::chrono::milliseconds>(nanoseconds(config_.peer_timeout));
}

void Fabric::link_leaders(TcpListener& listener, std::span<const PeerInfo> peer_infos,
                          Deadline deadline) {
  tree_ = HostTree::of(topology_.rank, topology_.node);
  std::vector<Rank> below;
  for (const HostTree::Branch& child : tree_.children) below.push_back(child.leader);
  check_sockets(topology_.rank, tree_.parent, below, peer_infos);
  std::vector<TcpPeer> peers;
  if (tree_.parent >= 0) {
    const TcpAddress address = way_to(peer_infos[static_cast<size_t>(tree_.parent)],
                                      peer_infos[static_cast<size_t>(topology_.rank)]);
    peers.push_back(tcp_connect(topology_.rank, tree_.parent, address, key_, deadline));
  }
  std::ranges::move(listener.accept(topology_.rank, below, key_, deadline),
                    std::back_inserter(peers));
  hosts_ = std::make_unique<TcpHostChannel>(std::move(peers), peer_timeout(), *poller_);
}

void Fabric::use(Parts parts) {
  control_ = std::move(parts.control);
  staging_ = std::move(parts.staging);
  flight_ = std::move(parts.flight);
  given_ = std::move(parts.links);
  hosts_ = std::move(parts.hosts);
  tree_ = std::move(parts.tree);
  open_wire_ = std::move(parts.open_wire);
}

void Fabric::finish(Deadline deadline) {
  if (hosts_) hosts_->finish(deadline);
}

}  // namespace farandole
