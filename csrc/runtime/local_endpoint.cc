// SPDX-License-Identifier: Apache-2.0
#include "runtime/local_endpoint.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/logging.h"
#include "lib/ipc/socket_folder.h"
#include "lib/mpi/mpi.h"
#include "lib/net/interfaces.h"

namespace farandole {

std::string text_of_mpi() {
  const std::optional<MpiLibrary> mpi = mpi_of_process();
  return mpi ? mpi->file + "\n" + mpi->abi + "\n" + mpi->version : "";
}

std::string text_of_sockets() {
  const SocketFolder folder = socket_folder();
  return folder.prefix + "\n" + folder.identity;
}

std::string text_of_addresses(const std::string& wanted) {
  const std::vector<Interface> all = interfaces();
  std::string text;
  for (const std::string& address : addresses_of(all, wanted)) {
    const auto of = std::ranges::find(all, address, &Interface::address);
    if (!of->loopback) text += of->name + " " + address + "\n";
  }
  return text;
}

LocalEndpoint::LocalEndpoint(Config its_config, StackSource its_stacks,
                             std::shared_ptr<Arena> its_arena)
    : config(std::move(its_config)),
      hosts(config.interface),
      stacks(its_stacks),
      arena(std::move(its_arena)) {}

Rank LocalEndpoint::probe(Rank own, const std::vector<Rank>& node,
                          std::span<const PeerInfo> peer_infos) {
  constexpr std::chrono::seconds kPatience{5};
  if (listener.name().empty() && node.size() > 1)
    throw Error(ErrorCode::kLibrary, listener.trouble());
  const Rank leader = nearest_leader(own, node, peer_infos);
  if (leader == own) return own;
  const PeerInfo& peer_info = peer_infos[static_cast<size_t>(leader)];
  try {
    to_leader = std::make_unique<UnixSocket>(UnixSocket::connect(
        peer_info.listener, proof_at(peer_info.listener, key), Deadline::in(kPatience)));
    return leader;
  } catch (const Error& error) {
    // The leader exists, but its backlog is full of connections from other ranks. SocketLinks will connect again.
    if (error.code() == ErrorCode::kStall) return leader;
    log(LogLevel::kWarning, "rank " + std::to_string(own) + " shares no memory with rank " +
                                std::to_string(leader) + " on the same host: " + error.what());
    return own;
  }
}

}  // namespace farandole
