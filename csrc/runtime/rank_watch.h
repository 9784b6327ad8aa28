// SPDX-License-Identifier: Apache-2.0
// What watches one rank: its flight recorder and timeline, deaths of its host's ranks, a stopped leader, and
// its stack reporter.
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

  // Starts to report deaths of this host's ranks, on a thread of its own.
  using OnDeath = std::function<void(Rank, Failure)>;
  void start(std::span<const PeerInfo> peer_infos, OnDeath on_death);
  void stop();

  // ---- Any thread
  Recorder& recorder() { return *recorder_; }
  // Time for which rank 0 may leave the question of a waiting rank unanswered; 0: for ever.
  struct Patience {
    int64_t warn_ns, abort_ns;
    int64_t pause_ns;  // between two questions; 0: there are none
  };
  const Patience& patience() const { return patience_; }
  // Why rank 0 does not answer: it, or a leader through which this rank hears of it, is seen to be stopped, or is out of
  // sight. Empty: all are seen to run.
  std::string why_standing() const;
  std::string why_silent() const;  // the same, never empty
  // Process numbers by rank; 0: on another host, or not visible.
  const std::vector<pid_t>& pids() const { return pids_; }
  // See StackReporter::ask().
  void ask_for_stacks(bool with_loops, std::function<void(StackReporter::Stacks)> tell) {
    stack_reporter_->ask(with_loops, std::move(tell));
  }
  PhaseWatch phases_of(SetId set);
  int flight_fd() const { return fabric_.flight().fd(); }
  // Writes to this rank's own file beside `path`. Throws as Timeline::start().
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
