// SPDX-License-Identifier: Apache-2.0
#include "runtime/wire_factory.h"

#include <utility>

#include "base/error.h"
#include "data/hierarchical/mpi_wire.h"
#include "data/hierarchical/tcp_wire.h"

namespace farandole {
namespace {

OpenWire by_mpi(MpiComm& mpi, const std::vector<std::string>& host_names) {
  return [&mpi, &host_names](const std::vector<Rank>& ranks, uint64_t number) {
    return std::make_unique<MpiWire>(mpi, ranks, host_names, number);
  };
}

OpenWire by_tcp(const Config& config, Rank own, std::span<const PeerInfo> peer_infos,
                TcpListener listener, const std::vector<std::string>& host_names) {
  auto ends = std::make_shared<TcpEnds>(
      TcpEnds{own, peer_infos[0].key, std::move(listener), {}, host_names, {}});
  ends->timeout =
      std::chrono::duration_cast<std::chrono::milliseconds>(nanoseconds(config.peer_timeout));
  std::vector<Rank> mute;
  for (const PeerInfo& peer_info : peer_infos) {
    if (peer_info.tcp.port == 0) mute.push_back(static_cast<Rank>(ends->addresses.size()));
    ends->addresses.push_back(way_to(peer_info, peer_infos[static_cast<size_t>(own)]));
  }
  if (mute.empty()) {
    return [ends](const std::vector<Rank>& ranks, uint64_t number) {
      return std::make_unique<TcpWire>(ends, ranks, number);
    };
  }
  throw Error(ErrorCode::kLibrary,
              "the ranks are on several hosts, but " + text_of_ranks(mute) +
                  " can't open a TCP socket, which carries inputs between hosts; allow sockets "
                  "there (container or sandbox settings), or start the job by mpirun, mpiexec or "
                  "srun, with mpi4py installed");
}

}  // namespace

OpenWire wire_factory(const Config& config, Rank own, std::span<const PeerInfo> peer_infos,
                      TcpListener listener, MpiComm* mpi,
                      const std::vector<std::string>& host_names) {
  const std::string& wanted = config.wire;
  if (wanted == "mpi" && mpi == nullptr) {
    throw Error(ErrorCode::kLibrary,
                "FARANDOLE_WIRE=mpi, but the job has no MPI: start the job by mpirun, mpiexec or "
                "srun, with mpi4py installed");
  }
  // Preferred because MPI also uses networks faster than TCP.
  if (wanted == "mpi" || (wanted == "auto" && mpi != nullptr)) return by_mpi(*mpi, host_names);
  return by_tcp(config, own, peer_infos, std::move(listener), host_names);
}

}  // namespace farandole
