// SPDX-License-Identifier: Apache-2.0
// What watches one rank: its flight recorder and timeline, deaths of its host's ranks, a stopped leader, and
// its stack reporter.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "data/backend/backend.h"
#include "runtime/fabric.h"
#include "watch/deaths.h"
#include "watch/recorder.h"
#include "watch/stack_reporter.h"
#include "watch/stopped_process.h"

namespace farandole {

class RankWatch {
 public:
  RankWatch(const Config& config, const Topology& topology, Fabric& fabric,
            std::span<const PeerInfo> peer_infos, StackSource stacks, int64_t began_ns);

  // Starts to report deaths of this host's ranks, on a thread of its own.
  using OnDeath = std::function<void(Rank, Failure)>;
  void start(std::span<const PeerInfo> peer_infos, OnDeath on_death);
  void stop();

  // ---- Any thread
  Recorder& recorder() { return *recorder_; }
  StoppedProcess& leader_process() { return *leader_process_; }
  // Until when rank 0 has to answer a question of a rank that waits. Never: it is this one, or on this host,
  // where it is seen to be stopped, or FARANDOLE_STALL_ABORT is 0.
  Deadline job_leader_answers() const;
  // The failure of a rank whose question rank 0 has not answered by then.
  Failure job_leader_silent() const;
  // See StackReporter::ask().
  void ask_for_stacks(bool with_loops, std::function<void(StackReporter::Stacks)> tell) {
    stack_reporter_->ask(with_loops, std::move(tell));
  }
  // Why a rank of this host is stopped, seen from outside; empty: it is not.
  std::string why_standing(Rank rank) const;
  PhaseWatch phases_of(SetId set);
  int flight_fd() const { return fabric_.flight().fd(); }
  // Writes to this rank's own file beside `path`. Throws as Timeline::start().
  void start_timeline(const std::string& path, bool mark_cycles);
  // Any thread; never throw. Write flight recorders to FARANDOLE_FLIGHT_DIR, if set: of all ranks of this
  // host; or of this rank and of dead ones that nobody else would dump.
  void dump_host(const std::string& reason);
  void dump_own(const std::string& reason);
  // Keeps in the recorder how this world came about, and dumps it.
  void tell_story(const std::string& text) { tell(&FlightPage::story, text, "a new world"); }
  // Keeps in the recorder that something looks wrong though nothing has failed, and dumps it.
  void tell_finding(const std::string& text) { tell(&FlightPage::findings, text, text); }

 private:
  std::vector<pid_t> pids_in_sight(std::span<const PeerInfo> peer_infos) const;
  std::vector<DeathWatch::Peer> peers_of(std::span<const PeerInfo> peer_infos) const;
  void open_recorder(int64_t began_ns);
  void tell_death(const DeathWatch::Peer& peer, const OnDeath& on_death);
  void dump(std::span<const int> locals, const std::string& reason);
  void tell(Stamped<FlightText> FlightPage::* lines, const std::string& text,
            const std::string& reason);

  const Config& config_;
  const Topology& topology_;
  Fabric& fabric_;
  const std::vector<pid_t> pids_;  // by rank; 0: on another host, or not visible
  const std::string job_leader_;   // rank 0 and its host
  std::unique_ptr<Recorder> recorder_;
  std::mutex lines_mutex_;
  std::unique_ptr<StoppedProcess> leader_process_;
  std::unique_ptr<StackReporter> stack_reporter_;
  std::unique_ptr<DeathWatch> deaths_;
};

}  // namespace farandole
