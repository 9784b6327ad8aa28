// SPDX-License-Identifier: Apache-2.0
// One rank between init and shutdown. Nothing here is global: a process may live through several of these, one after
// the other.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/topology.h"
#include "control/hosts/host_leader.h"
#include "runtime/door.h"
#include "runtime/driver.h"
#include "runtime/fabric.h"
#include "runtime/gpu_access.h"
#include "runtime/leaver.h"
#include "runtime/plane_factory.h"
#include "runtime/rank_watch.h"
#include "runtime/submitter.h"
#include "runtime/waiter.h"

namespace farandole {

class Runtime {
 public:
  // Meets the others: collective, bounded by FARANDOLE_INIT_TIMEOUT.
  // mpi_comm: the address of an MPI_Comm of the same ranks; without it inputs travel between hosts by TCP.
  Runtime(Door door, Topology topology, std::span<const Card> cards,
          const void* mpi_comm = nullptr);
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  // ---- any thread. As Submitter and Waiter have them.
  std::vector<Handle> submit(std::span<const farandole_request> requests) {
    return submitter_->submit(requests);
  }
  Handle submit(const Asked& kept, const void* input, void* output, uint64_t stream = 0) {
    return submitter_->submit(kept, input, output, stream);
  }
  Asked keep(const farandole_request& request) { return submitter_->keep(request); }
  void refuse(const farandole_request& request, const Failure& why) {
    submitter_->refuse(request, why);
  }
  int64_t count_unnamed(SetId set) { return submitter_->count_unnamed(set); }
  WaitEnd wait(std::span<const Handle> handles, Deadline deadline, Failure& failure) {
    return waiter_->wait(handles, deadline, failure);
  }
  std::string explain(Handle handle, Deadline deadline) {
    return waiter_->explain(handle, deadline);
  }
  bool done(Handle handle) { return waiter_->done(handle); }
  bool broken() const { return calls_->job.broken(); }
  // As Leaver has them.
  bool leave(bool failed, const std::string& why, Deadline deadline) {
    return leaver_->leave(failed, why, deadline);
  }
  Failure gave_up() const { return leaver_->gave_up(); }
  // As Fabric has it.
  void forked() { fabric_->forked(); }

  Handles& handles() { return calls_->handles; }
  std::vector<Rank> ranks_of(SetId set);
  const Topology& topology() const { return topology_; }
  const Config& config() const { return config_; }
  GpuAccess& gpus() { return *gpus_; }
  RankWatch& watch() { return *watch_; }
  uint64_t sleeps() const { return driver_->sleeps(); }
  // Own bytes that peers have read or written in place.
  uint64_t mapped_bytes() const {
    return fabric_->arenas() ? fabric_->arenas()->mapped_bytes() : 0;
  }

 private:
  void open_leader();
  void open_engine();

  Config config_;
  const Topology topology_;
  std::unique_ptr<Fabric> fabric_;
  std::unique_ptr<PlaneFactory> planes_;
  std::unique_ptr<RankWatch> watch_;
  std::unique_ptr<ShmMember> channel_;
  std::unique_ptr<HostLeader> leader_;  // null: another rank leads this host
  std::unique_ptr<RankCalls> calls_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<GpuAccess> gpus_;  // goes before the engine, whose calls its lane ends
  std::unique_ptr<Driver> driver_;
  std::unique_ptr<Submitter> submitter_;
  std::unique_ptr<Waiter> waiter_;
  std::unique_ptr<Leaver> leaver_;
};

}  // namespace farandole
