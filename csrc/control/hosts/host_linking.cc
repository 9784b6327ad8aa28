// SPDX-License-Identifier: Apache-2.0
#include "control/hosts/host_linking.h"

#include <poll.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "control/channel/mpi_channel.h"
#include "control/channel/tcp_channel.h"

namespace farandole {
namespace {

// How long TCP may take where there is another way.
constexpr std::chrono::seconds kTcpPatience{10};
constexpr int kPollMs = 1;

using Peers = std::vector<TcpPeer>;

const Key128& key_of(const HostLinking& own) { return own.cards[0].key; }

void check_reachable(const HostLinking& own) {
  std::vector<Rank> needed = own.below;
  needed.push_back(own.rank);
  if (own.above >= 0) needed.push_back(own.above);
  std::vector<Rank> mute;
  std::ranges::copy_if(needed, std::back_inserter(mute), [&](Rank rank) {
    return own.cards[static_cast<size_t>(rank)].tcp.port == 0;
  });
  if (mute.empty()) return;
  std::ranges::sort(mute);
  throw Error(ErrorCode::kLibrary,
              "the ranks sit on several hosts, and " + text_of_ranks(mute) +
                  " can't open a TCP socket, by which the hosts agree on what to reduce; allow "
                  "sockets there (container or sandbox settings)");
}

Peers meet_by_tcp(const HostLinking& own, TcpListener& listener, Deadline deadline) {
  check_reachable(own);
  Peers peers;
  if (own.above >= 0) {
    const TcpAddress& address = own.cards[static_cast<size_t>(own.above)].tcp;
    peers.push_back(tcp_connect(own.rank, own.above, address, key_of(own), deadline));
  }
  for (TcpPeer& peer : listener.accept(own.rank, own.below, key_of(own), deadline)) {
    peers.push_back(std::move(peer));
  }
  return peers;
}

// If the peer never comes, its byte is MPI's for ever.
std::byte await(MpiRequest request, std::unique_ptr<std::byte> word, Rank peer, Deadline deadline) {
  while (!request.test()) {
    if (deadline.expired()) {
      word.release();
      throw Error(ErrorCode::kPeer, "rank " + std::to_string(peer) +
                                        ", the leader of another host, says nothing by MPI either");
    }
    poll(nullptr, 0, kPollMs);  // MPI has no wait with a deadline; only at init
  }
  return *word;
}

// Whether all leaders say so: the verdicts go up the tree, the answer comes down.
bool all_agree(const HostLinking& own, bool mine, Deadline deadline) {
  MpiComm& mpi = *own.mpi;
  const int tag = mpi.largest_tag();
  std::byte word{static_cast<unsigned char>(mine)};
  const auto receive = [&](Rank from) {
    auto heard = std::make_unique<std::byte>();
    MpiRequest request = mpi.receive(heard.get(), 1, from, tag);
    return await(std::move(request), std::move(heard), from, deadline);
  };
  const auto send = [&](Rank to) {
    auto said = std::make_unique<std::byte>(word);
    MpiRequest request = mpi.send(said.get(), 1, to, tag);
    await(std::move(request), std::move(said), to, deadline);
  };
  for (Rank child : own.below) word &= receive(child);
  if (own.above >= 0) {
    send(own.above);
    word = receive(own.above);
  }
  for (Rank child : own.below) send(child);
  return word != std::byte{0};
}

std::unique_ptr<HostChannel> by_tcp(const HostLinking& own, Peers peers) {
  return std::make_unique<TcpChannel>(std::move(peers), own.peer_timeout, own.notify);
}

std::unique_ptr<HostChannel> by_mpi(const HostLinking& own) {
  std::vector<Rank> peers = own.below;
  if (own.above >= 0) peers.push_back(own.above);
  return std::make_unique<MpiChannel>(*own.mpi, peers, own.peer_timeout, own.notify);
}

}  // namespace

std::unique_ptr<HostChannel> link_hosts(const HostLinking& own, TcpListener& listener,
                                        Deadline deadline) {
  const bool known = own.way == "auto" || own.way == "tcp" || own.way == "mpi";
  if (!known) {
    throw Error(ErrorCode::kInvalidArgument,
                "FARANDOLE_CHANNEL='" + own.way + "' is none of auto, tcp, mpi");
  }
  if (own.way == "mpi" && !own.mpi) {
    throw Error(ErrorCode::kLibrary,
                "FARANDOLE_CHANNEL=mpi, and there is no MPI: start the job by mpirun, mpiexec or "
                "srun, with mpi4py installed");
  }
  if (own.way == "mpi") return by_mpi(own);
  if (own.way == "tcp" || !own.mpi) return by_tcp(own, meet_by_tcp(own, listener, deadline));
  Peers peers;
  std::string why;
  try {
    peers = meet_by_tcp(own, listener, std::min(deadline, Deadline::in(kTcpPatience)));
  } catch (const Error& error) {
    why = error.what();
  }
  if (all_agree(own, why.empty(), deadline)) return by_tcp(own, std::move(peers));
  const LogLevel level = why.empty() ? LogLevel::kInfo : LogLevel::kWarning;
  log(level, "the hosts talk by MPI, which has to be polled, since TCP between them is blocked" +
                 (why.empty() ? " elsewhere" : ": " + why) +
                 ". FARANDOLE_CHANNEL=mpi saves trying");
  return by_mpi(own);
}

}  // namespace farandole
