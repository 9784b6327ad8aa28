// SPDX-License-Identifier: Apache-2.0
#include "runtime/wire_factory.h"

#include <utility>

#include "base/error.h"
#include "data/hierarchical/mpi_wire.h"
#include "data/hierarchical/tcp_wire.h"

namespace farandole {
namespace {

OpenWire by_mpi(WireContext& context) {
  if (context.mpi != nullptr) {
    return [&mpi = *context.mpi, &names = context.host_names](const std::vector<Rank>& ranks,
                                                              uint64_t number) {
      return std::make_unique<MpiWire>(mpi, ranks, names, number);
    };
  }
  if (context.config.wire == "auto") return {};
  throw Error(ErrorCode::kLibrary,
              "FARANDOLE_WIRE=mpi, but the job has no MPI: start the job by mpirun, mpiexec or "
              "srun, with mpi4py installed");
}

OpenWire by_tcp(WireContext& context) {
  const std::span<const PeerInfo> peer_infos = context.peer_infos;
  auto ends = std::make_shared<TcpEnds>(TcpEnds{
      context.own, peer_infos[0].key, std::move(context.listener), {}, context.host_names, {}});
  ends->timeout = std::chrono::duration_cast<std::chrono::milliseconds>(
      nanoseconds(context.config.peer_timeout));
  std::vector<Rank> mute;
  for (const PeerInfo& peer_info : peer_infos) {
    if (peer_info.tcp.port == 0) mute.push_back(static_cast<Rank>(ends->addresses.size()));
    ends->addresses.push_back(way_to(peer_info, peer_infos[static_cast<size_t>(context.own)]));
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

struct Transport {
  const char* name;                                               // a value of FARANDOLE_WIRE
  OpenWire (*meet)(WireContext&);                                 // empty: not here, on auto
  std::shared_ptr<WireEnd> (*open_end)(const Config&) = nullptr;  // if it has addresses of its own
};
// On auto the first that is available: MPI also uses networks faster than TCP.
constexpr Transport kTransports[] = {{"mpi", by_mpi}, {"tcp", by_tcp}};

}  // namespace

WireEnds open_wire_ends(const Config& config) {
  WireEnds ends;
  for (const Transport& one : kTransports) {
    if (one.open_end != nullptr) ends[one.name] = one.open_end(config);
  }
  return ends;
}

OpenWire wire_factory(WireContext context) {
  for (const Transport& one : kTransports) {
    if (context.config.wire != "auto" && context.config.wire != one.name) continue;
    if (OpenWire found = one.meet(context)) return found;
  }
  throw Error(ErrorCode::kInternal, "no transport between hosts");
}

}  // namespace farandole
