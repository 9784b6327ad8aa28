// SPDX-License-Identifier: Apache-2.0
// Owns a rank's flight recorder, timeline, death watch and stack reporter. Finds out why rank 0 does not answer.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/backend/backend.h"
#include "runtime/fabric.h"
#include "watch/deaths.h"
#include "watch/recorder.h"
#include "watch/stack_reporter.h"

namespace farandole {

class RankWatch {
 public:
  RankWatch(const Config& config, const Topology& topology, Fabric& fabric,
            std::span<const PeerInfo> peer_infos, StackSource stacks, int64_t began_ns);

  // Starts a thread that reports the deaths of this host's ranks. Also starts the timeline if one is configured.
  using OnDeath = std::function<void(Rank, Failure)>;
  void start(std::span<const PeerInfo> peer_infos, OnDeath on_death);
  void stop();

  // ---- Any thread
  Recorder& recorder() { return *recorder_; }
  // Times in nanoseconds after which a rank warns or fails if rank 0 does not answer a question. 0 means never.
  struct Patience {
    int64_t warn_ns, abort_ns;
    int64_t pause_ns;  // time between two checks of a waiting rank; 0 means no checks
    bool asks;         // true if this rank asks rank 0 for a sign of life
  };
  const Patience& patience() const { return patience_; }
  // Returns the reason for rank 0's silence: rank 0, or a leader on the path to it, is stopped, or its process is not
  // visible from here. Returns an empty string if all these processes are running.
  std::string why_standing() const;
  std::string why_silent() const;  // like why_standing(), but never empty
  // Process ids, indexed by rank. The id is 0 for a rank on another host or in another PID namespace.
  const std::vector<pid_t>& pids() const { return pids_; }
  void ask_for_stacks(bool with_loops, std::function<void(StackReporter::Stacks)> tell) {
    stack_reporter_->ask(with_loops, std::move(tell));
  }
  PhaseWatch phases_of(SetId set);
  int flight_fd() const { return fabric_.flight().fd(); }
  // Starts a timeline that is written to timeline_path(path). Throws the same errors as Timeline::start().
  void start_timeline(const std::string& path, bool mark_cycles);

 private:
  std::vector<pid_t> pids_in_sight(std::span<const PeerInfo> peer_infos) const;
  std::vector<DeathWatch::Peer> peers_of(std::span<const PeerInfo> peer_infos) const;
  void open_recorder(int64_t began_ns);
  void tell_death(const DeathWatch::Peer& peer, const OnDeath& on_death);

  const Config& config_;
  const Topology& topology_;
  Fabric& fabric_;
  const std::vector<pid_t> pids_;
  const Patience patience_;
  std::unique_ptr<Recorder> recorder_;
  std::unique_ptr<StackReporter> stack_reporter_;
  std::unique_ptr<DeathWatch> deaths_;
};

}  // namespace farandole
