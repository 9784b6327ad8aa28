// SPDX-License-Identifier: Apache-2.0
// One rank between init and shutdown; used by csrc/api. Nothing in it is global, so a process may create
// several of these in turn.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/topology.h"
#include "control/hosts/host_controller.h"
#include "runtime/backend_factory.h"
#include "runtime/calls/rank_calls.h"
#include "runtime/driver.h"
#include "runtime/fabric.h"
#include "runtime/gpu_access.h"
#include "runtime/local_endpoint.h"
#include "runtime/rank_watch.h"

namespace farandole {

class Runtime {
 public:
  // Collective, within FARANDOLE_INIT_TIMEOUT. `mpi_comm`: address of an MPI_Comm with the same ranks;
  // without it, tensors travel between hosts by TCP.
  Runtime(LocalEndpoint endpoint, Topology topology, std::span<const PeerInfo> peer_infos,
          const void* mpi_comm = nullptr);
  // For simulations: this rank is connected already by `fabric`, and its owner tells it of deaths.
  Runtime(Config config, Topology topology, std::span<const PeerInfo> peer_infos,
          std::unique_ptr<Fabric> fabric);
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  // ---- Any thread
  // Checks a call once, to submit it, repeatedly perhaps; see check_call(). Peers do not hear of an error.
  CheckedCall prepare(std::span<const farandole_request> tensors, size_t count);
  // Submits prepared calls in order, up to the first that fails, whose error it throws; sets the handles of
  // those before.
  void submit(std::span<PreparedSubmission> batch);
  // Makes one call whose caller waits. True: it is done, and has no handle.
  bool call(PreparedSubmission& prepared);
  void refuse(const farandole_request& request, const Failure& why);
  // A rank of this host has died.
  void lose(Rank rank, Failure failure);
  Driver& driver() { return *driver_; }
  // Reports that this rank leaves, waits for the others as long as the settings allow, and fails its calls in flight.
  // nullopt: not before `deadline`; call it again. Else the runtime may be destroyed, and the failure says why this rank,
  // after a normal leave, did not wait until the others had left. A normal leave may be turned into a failed one.
  std::optional<Failure> leave(bool failed, const std::string& why, Deadline deadline);
  RankCalls& calls() { return *calls_; }
  Handles& handles() { return calls_->handles; }
  bool broken() const { return calls_->job.broken(); }
  std::vector<Rank> ranks_of(SetId set);
  const Topology& topology() const { return topology_; }
  const Config& config() const { return config_; }
  GpuAccess& gpus() { return *gpus_; }
  RankWatch& watch() { return *watch_; }
  // Bytes of this rank that peers have read or written in place (zero copy).
  uint64_t mapped_bytes() const {
    return fabric_->arenas() ? fabric_->arenas()->mapped_bytes() : 0;
  }

 private:
  void open_leader();
  void open_engine(int cores);
  void say_leave(bool failed, const std::string& why);
  Failure fault_of(PreparedSubmission& prepared);

  Config config_;
  const Topology topology_;
  std::unique_ptr<Fabric> fabric_;
  std::unique_ptr<BackendFactory> backends_;
  std::unique_ptr<RankWatch> watch_;
  std::unique_ptr<MemberChannel> channel_;
  std::unique_ptr<HostController> leader_;  // null: this rank is not its host's leader
  std::unique_ptr<RankCalls> calls_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<GpuAccess> gpus_;  // goes before the engine: its lane ends the engine's calls
  std::unique_ptr<Driver> driver_;
};

}  // namespace farandole
