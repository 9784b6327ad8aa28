// SPDX-License-Identifier: Apache-2.0
#include "runtime/fabric.h"

#include <numeric>
#include <utility>

#include "control/hosts/host_linking.h"
#include "watch/flight_memory.h"

namespace farandole {
namespace {

std::vector<int> all_locals(int ranks) {
  std::vector<int> locals(static_cast<size_t>(ranks));
  std::iota(locals.begin(), locals.end(), 0);
  return locals;
}

}  // namespace

Fabric::Fabric(const Config& config, const Topology& topology, std::span<const Card> cards,
               const void* mpi_comm)
    : config_(config), topology_(topology) {
  if (topology_.local_size() < topology_.size && mpi_comm != nullptr) {
    mpi_ = MpiComm::borrow(mpi_comm);
  }
  for (const Card& card : cards) host_names_.push_back(card.host);
}

void Fabric::share_memory(UnixListener& listener, std::unique_ptr<UnixSocket> to_leader,
                          std::span<const Card> cards, size_t staging_bytes, Deadline deadline) {
  links_ = HostLinks(topology_, cards, listener, std::move(to_leader), deadline);
  const int ranks = topology_.local_size();
  const auto segment = [&](const char* name, size_t bytes) {
    return links_.leads() ? links_.give(name, bytes, all_locals(ranks)) : links_.receive(deadline);
  };
  control_ = segment("farandole-control", ShmLayout::bytes_needed(ranks));
  staging_ = segment("farandole-staging", staging_bytes);
  flight_ = segment("farandole-flight", FlightMemory::bytes_needed(ranks, topology_.size));
  bells_ = control().bells();
}

void Fabric::share_arena(std::shared_ptr<Arena> own, Deadline deadline) {
  const int ranks = topology_.local_size();
  if (ranks == 1) return;
  arena_directory_ =
      links_.leads()
          ? links_.give("farandole-arenas", ArenaDirectory::bytes_needed(ranks), all_locals(ranks))
          : links_.receive(deadline);
  std::vector<Fd> fds = links_.share(own->fd(), deadline);
  arenas_ = std::make_unique<HostArenas>(std::move(own), topology_.local_rank, std::move(fds),
                                         ArenaDirectory(arena_directory_.data(), ranks));
}

void Fabric::link_hosts(TcpListener listener, std::span<const Card> cards, Deadline deadline) {
  if (topology_.local_size() == topology_.size) return;
  if (links_.leads()) link_leaders(listener, cards, deadline);
  open_wire_ =
      wire_factory(config_, topology_.rank, cards, std::move(listener), mpi_.get(), host_names_);
}

void Fabric::link_leaders(TcpListener& listener, std::span<const Card> cards, Deadline deadline) {
  tree_ = HostTree::of(topology_.rank, topology_.node);
  HostLinking linking;
  linking.rank = topology_.rank;
  linking.above = tree_.parent;
  for (const HostTree::Branch& child : tree_.children) linking.below.push_back(child.leader);
  linking.cards = cards;
  linking.way = config_.channel;
  linking.mpi = mpi_.get();
  linking.peer_timeout =
      std::chrono::duration_cast<std::chrono::milliseconds>(nanoseconds(config_.peer_timeout));
  linking.notify = [this] { bell().notify(); };
  hosts_ = farandole::link_hosts(linking, listener, deadline);
}

void Fabric::finish(Deadline deadline) {
  if (hosts_) hosts_->finish(deadline);
}

}  // namespace farandole
