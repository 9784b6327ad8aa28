// SPDX-License-Identifier: Apache-2.0
// What a rank watches: its flight recorder, deaths of its peers, a leader that stands still, and where its own
// threads are.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/plane/phase.h"
#include "runtime/fabric.h"
#include "watch/deaths.h"
#include "watch/recorder.h"
#include "watch/standstill.h"
#include "watch/witness.h"

namespace farandole {

class RankWatch {
 public:
  // Collective on the host: clocks are compared.
  RankWatch(const Config& config, const Topology& topology, Fabric& fabric,
            std::span<const Card> cards, StackSource stacks, int64_t began_ns, Deadline deadline);

  // From here on: a peer of this host has died. On a thread of its own.
  using OnDeath = std::function<void(Rank, Failure)>;
  void start(std::span<const Card> cards, OnDeath on_death);
  void stop();

  // ---- any thread
  Recorder& recorder() { return *recorder_; }
  Standstill& leader_stands() { return *leader_stands_; }
  // Where this process is, once it is known, or that it does not answer.
  void ask_whereabouts(std::function<void(std::string)> tell) { witness_->ask(std::move(tell)); }
  // Why a rank of this host stands still, as seen from outside; empty: it does not.
  std::string why_standing(Rank rank) const;
  PhaseWatch phases_of(SetId set);
  int flight_fd() const { return fabric_.flight().fd(); }
  // Into this rank's own file beside `path`. Throws as Timeline::start does.
  void start_timeline(const std::string& path, bool mark_cycles);
  // Any thread; never throws. Into FARANDOLE_FLIGHT_DIR, if it is set: the flight recorders of all ranks
  // of this host, or of this rank and the dead ones that nobody else would dump.
  void dump_host(const std::string& reason);
  void dump_own(const std::string& reason);

 private:
  std::vector<pid_t> pids_in_sight(std::span<const Card> cards) const;
  std::vector<DeathWatch::Peer> peers_of(std::span<const Card> cards) const;
  void open_recorder(int64_t began_ns, Deadline deadline);
  void tell_death(const DeathWatch::Peer& peer, const OnDeath& on_death);
  void dump(std::span<const int> locals, const std::string& reason);

  const Config& config_;
  const Topology& topology_;
  Fabric& fabric_;
  const std::vector<pid_t> pids_;  // by rank; 0: on another host, or out of sight
  std::unique_ptr<Recorder> recorder_;
  std::unique_ptr<Standstill> leader_stands_;
  std::unique_ptr<Witness> witness_;
  std::unique_ptr<DeathWatch> deaths_;
};

}  // namespace farandole
