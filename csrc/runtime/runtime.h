// SPDX-License-Identifier: Apache-2.0
// One rank from init to shutdown, for csrc/api. Has no globals, so a process may create several, one after another.
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
  // All ranks must call this within FARANDOLE_INIT_TIMEOUT. `mpi_comm` points to an MPI_Comm of these ranks or is null.
  Runtime(LocalEndpoint endpoint, Topology topology, std::span<const PeerInfo> peer_infos,
          const void* mpi_comm = nullptr);
  // For simulations. `fabric` already connects this rank, and the simulation calls lose() to report deaths.
  Runtime(Config config, Topology topology, std::span<const PeerInfo> peer_infos,
          std::unique_ptr<Fabric> fabric);
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  // ---- Any thread
  // See farandole_prepare_call() and check_call().
  CheckedCall prepare(std::span<const farandole_request> tensors, size_t count);
  // See farandole_submit(). Throws the first error.
  void submit(std::span<PreparedSubmission> batch);
  // See farandole_call_one(). Returns true if the call is done; its handle has then been released.
  bool call(PreparedSubmission& prepared);
  void refuse(const farandole_request& request, const Failure& why);
  void lose(Rank rank, Failure failure);
  Driver& driver() { return *driver_; }
  // See farandole_shutdown(). Returns nullopt if `deadline` passes; the caller must repeat the call in that case.
  // Otherwise the runtime may be destroyed, and a failure says why this rank has not waited for all others. A failed
  // leave may follow a normal one.
  std::optional<Failure> leave(bool failed, const std::string& why, Deadline deadline);
  RankCalls& calls() { return *calls_; }
  Handles& handles() { return calls_->handles; }
  bool broken() const { return calls_->job.broken(); }
  std::vector<Rank> ranks_of(SetId set);
  const Topology& topology() const { return topology_; }
  const Config& config() const { return config_; }
  GpuAccess& gpus() { return *gpus_; }
  RankWatch& watch() { return *watch_; }
  // Returns the number of bytes in this rank's memory that peers have accessed in place (zero copy).
  uint64_t mapped_bytes() const {
    return fabric_->arenas() ? fabric_->arenas()->mapped_bytes() : 0;
  }

 private:
  void open_leader();
  void open_engine(int cores);
  void say_leave(Leave leave);
  Failure fault_of(PreparedSubmission& prepared);

  Config config_;
  const Topology topology_;
  std::unique_ptr<Fabric> fabric_;
  std::unique_ptr<BackendFactory> backends_;
  std::unique_ptr<RankWatch> watch_;
  std::unique_ptr<MemberChannel> channel_;
  std::unique_ptr<HostController> leader_;  // null unless this rank is its host's leader
  std::unique_ptr<RankCalls> calls_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<GpuAccess>
      gpus_;  // destroyed before the engine, because the GPU's lane ends the engine's calls
  std::unique_ptr<Driver> driver_;
};

}  // namespace farandole
