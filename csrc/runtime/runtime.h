// SPDX-License-Identifier: Apache-2.0
// One rank between init and shutdown: its threads, its waits, its leaving. Nothing here is global: a
// process may live through several of these, one after the other.
#pragma once

#include <atomic>
#include <latch>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/config.h"
#include "control/bootstrap/meeting.h"
#include "control/channel/shm_channel.h"
#include "control/hosts/host_leader.h"
#include "data/plane/phase.h"
#include "data/shm/host_arenas.h"
#include "lib/mpi/mpi.h"
#include "runtime/calls/intake.h"
#include "runtime/engine/engine.h"
#include "runtime/gpu/rank_gpu.h"
#include "runtime/spin.h"
#include "watch/deaths.h"
#include "watch/recorder.h"
#include "watch/standstill.h"
#include "watch/witness.h"

namespace farandole {

// What a rank opens before it meets the others.
struct Door {
  Config config;
  JobKey key;
  UnixListener listener;
  TcpListener hosts;
  StackSource stacks;
  std::shared_ptr<Arena> arena;  // what this rank shares; arrays in it may outlive the job
  std::unique_ptr<UnixSocket> to_leader;
  explicit Door(Config its_config, StackSource its_stacks = {},
                std::shared_ptr<Arena> its_arena = std::make_shared<Arena>());
  // The rank whose memory this one will share: the lowest that lets it in; itself, if none does.
  // node: as MPI has it.
  Rank knock(Rank own, const std::vector<Rank>& node, std::span<const Card> cards);
  ByteString card() const { return own_card(config, listener, hosts.address(), key).encode(); }
};

enum class WaitEnd {
  kDone,
  kFailed,    // one of them; `failure` says how
  kTimeIsUp,  // or a signal came: let handlers run, then wait again
};

class Runtime {
 public:
  // Meets the others: collective, bounded by FARANDOLE_INIT_TIMEOUT.
  // mpi_comm: the address of an MPI_Comm of the same ranks; without it only small inputs travel between hosts.
  Runtime(Door door, Topology topology, std::span<const Card> cards,
          const void* mpi_comm = nullptr);
  ~Runtime();
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  // ---- any thread
  // All or none; on an argument error the peers fail too.
  std::vector<Handle> submit(std::span<const farandole_request> requests);
  // A request kept for repeated submission.
  Handle submit(const Asked& kept, const void* input, void* output, uint64_t stream = 0);
  Asked keep(const farandole_request& request);
  void refuse(const farandole_request& request, const Failure& why);
  WaitEnd wait(std::span<const Handle> handles, Deadline deadline, Failure& failure);
  // Whom the call behind `handle` waits for, as the coordinator knows it.
  std::string explain(Handle handle, Deadline deadline);
  bool done(Handle handle);
  bool broken() const { return engine_->broken(); }
  // Until `deadline`; true: this rank has left, the object may go. Idempotent.
  bool leave(bool failed, const std::string& why, Deadline deadline);

  // In a forked child: lets go of the connections, or a rank that dies while its children live would not
  // be missed.
  void forked() { links_ = {}; }
  // What comes later in `stream` sees the results of these launched calls.
  void join_stream(std::span<const Handle> handles, uint64_t stream);
  // This rank's GPU, opened by the first call. Throws kInvalidArgument for another one, kLibrary.
  std::shared_ptr<GpuDevice> gpu(int ordinal);
  int device_of(uint64_t address);
  const GpuAdasum& adasum(int ordinal);
  // As RankGpu::open_window.
  std::shared_ptr<GpuWindow> open_window(int ordinal, SetId set, size_t bytes);

  Handles& handles() { return engine_->handles(); }
  std::vector<Rank> ranks_of(SetId set);
  const Topology& topology() const { return topology_; }
  const Config& config() const { return config_; }
  uint64_t sleeps() const { return sleeps_; }
  Recorder& recorder() { return *recorder_; }
  int flight_fd() const { return flight_.fd(); }
  // Into this rank's own file beside `path`. Throws as Timeline::start does.
  void start_timeline(const std::string& path, bool mark_cycles);
  // Any thread; never throws. Into FARANDOLE_FLIGHT_DIR, if it is set: the flight recorders of all ranks
  // of this host, or of this rank and the dead ones that nobody else would dump.
  void dump_host(const std::string& reason);
  void dump_own(const std::string& reason);
  // Own bytes that peers have read or written in place.
  uint64_t mapped_bytes() const { return arenas_ ? arenas_->mapped_bytes() : 0; }

 private:
  void open_arenas(std::shared_ptr<Arena> own, Deadline deadline);
  void meet_hosts(TcpListener listener, std::span<const Card> cards, Deadline deadline);
  void open_engine(std::span<const Card> cards, Segment world_staging);
  std::unique_ptr<Lane> open_lane(SetId id, const ProcessSet& set, Segment& staging);
  size_t staging_bytes(const std::vector<Rank>& ranks) const;
  std::unique_ptr<Lane> lane_across_hosts(SetId id, const ProcessSet& set, Segment& staging,
                                          std::vector<EventCount*> bells);
  std::vector<DeathWatch::Peer> peers(std::span<const Card> cards) const;
  std::vector<pid_t> pids_in_sight(std::span<const Card> cards) const;
  void on_death(const DeathWatch::Peer& peer);
  void look_at_leader();
  void open_recorder(int64_t began_ns, Deadline deadline);
  void begin_timeline();
  PhaseWatch phases_of(SetId set);
  void dump(std::span<const int> locals, const std::string& reason);
  void describe(Asked& asked);  // to the recorder; under the engine's mutex

  // ---- GPUs, in runtime_gpu.cc
  void open_gpu(std::span<const farandole_request> requests);
  Place place_of(const Request& request) const;
  void mark_produced(std::span<Submission* const> submissions);  // under the engine's mutex

  struct Role;  // the driver's

  void check_open() const;
  std::vector<Asked> take_in_all(std::span<const farandole_request> requests);
  // Both under the engine's mutex.
  Handle enter(const Request& request, Submission submission);
  void refuse_locked(const Request& request, const Failure& why);
  void check_numerics(const Request& request, const Submission& submission);
  void refuse_all(std::span<const farandole_request> requests, const Failure& why);
  void after_submit();
  bool work_is_left() const;
  bool sleeps_past_tick() const;
  bool step();
  void say_last();
  template <class Step>
  bool guarded(Step&& step);
  template <class Predicate>
  bool drive(Predicate&& done, Deadline deadline);
  bool await(const std::function<bool()>& done, Deadline deadline);
  void background();
  void ask_scheduler();

  Config config_;
  Topology topology_;
  std::vector<std::string> host_names_;  // by rank
  HostLinks links_;
  std::unique_ptr<MpiComm> mpi_;  // null: one host, or no MPI
  Segment control_;
  Segment flight_;
  std::unique_ptr<Recorder> recorder_;
  Segment arena_directory_;
  std::unique_ptr<HostArenas> arenas_;  // null: no peer on this host
  std::vector<EventCount*> bells_;      // by local rank
  EventCount* bell_ = nullptr;          // own
  std::unique_ptr<ShmMember> channel_;
  HostTree tree_;
  std::unique_ptr<HostChannel> hosts_;  // leaders of several hosts only
  std::unique_ptr<HostLeader> leader_;
  std::unique_ptr<Engine> engine_;
  std::mutex gpu_mutex_;
  std::shared_ptr<const cuda::Api> driver_;  // before there is a device, to ask where memory lies
  std::unique_ptr<RankGpu> gpu_;             // goes before the engine, whose calls its lane ends
  std::unique_ptr<DeathWatch> watch_;
  std::unique_ptr<Standstill> leader_stands_;
  std::unique_ptr<Witness> witness_;
  Spin spin_;
  std::once_flag leave_once_;
  std::atomic<bool> leaving_{false};
  Deadline leave_deadline_ = Deadline::never();
  std::atomic<bool> quit_{false};
  std::atomic<uint64_t> sleeps_{0};
  std::atomic<int64_t> sleeps_until_ns_{0};  // the background thread's last sleep; max: for ever
  std::atomic<uint64_t> questions_{0};
  std::latch scheduled_{1};  // the background thread runs as FARANDOLE_PRIORITY says
  std::thread thread_;
};

}  // namespace farandole
