// SPDX-License-Identifier: Apache-2.0
// Decides what is reduced, and in which order. A pure state machine: reports and the time go in, log
// entries come out; no thread, socket, clock or environment inside. Lives in rank 0. The idea of
// negotiating readiness by name is Horovod's (Sergeev and Del Balso, 2018).
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "control/calls/rank_group.h"
#include "control/coordinator/backend_policy.h"
#include "control/coordinator/group_rules.h"
#include "control/coordinator/open_calls.h"
#include "control/coordinator/outbox.h"
#include "control/coordinator/publisher.h"
#include "control/coordinator/set_table.h"
#include "control/coordinator/settings.h"
#include "control/coordinator/stall_monitor.h"
#include "control/coordinator/step_predictor.h"

namespace farandole {

class Coordinator {
 public:
  using Settings = CoordinatorSettings;
  using LateRank = Outbox::LateRank;
  explicit Coordinator(Settings settings);

  // A report of one rank. A report that its rank could not have sent throws Error(kInternal).
  void receive(Rank from, const Report& report, int64_t now_ns);
  // Ranks that may report together: those on one host, or below it. Returns their number.
  int add_group(std::vector<Rank> ranks);
  // A report of all of them that are in its set: ReadyAll, or Ready with input and an id.
  void receive_all(int group, const Report& report, int64_t now_ns);
  // A rank has died or cannot go on: as if it had left with this failure.
  void lose(Rank rank, Failure failure);
  // The time goes on: looks for stalls when next_tick() has come.
  void tick(int64_t now_ns);
  int64_t next_tick() const;  // INT64_MAX: nothing waits

  // What the ranks must learn now, in log order, in the place of what `log` held. Call after a batch of
  // reports: everything that became ready in the batch may share a bucket.
  void publish(std::vector<Entry>& log);
  // A process set that publish() has just opened can't be had after all (no memory).
  void withdraw_set(SetId id) { sets_.erase(id); }
  // What a person should read (stalls), since the last call.
  std::vector<std::string> take_notices() { return outbox_.take_notices(); }
  // Who was the last of a set to be ready for something; since the last call.
  void take_late_ranks(std::vector<LateRank>& into) { outbox_.take_late_ranks(into); }

  // For tests and metrics.
  size_t definitions() const { return calls_.registry().size(); }
  size_t bundles() const { return predictor_.size(); }

 private:
  void ready(Rank from, const Ready& ready, int64_t now_ns);
  // Of many ranks at once; false: it has to be taken rank by rank.
  bool ready(RankGroup& group, const Ready& ready, int64_t now_ns);
  void refuse(Rank from, const Refuse& refuse, int64_t now_ns);
  void join(Rank from, const Join& join, int64_t now_ns);
  void done(Rank from, const Done& done, int64_t now_ns);
  void leave(Rank from, const Leave& leave, int64_t now_ns);

  Call& find_call(SetState& set, Definition& definition, const Request& request, uint64_t sequence,
                  int64_t now_ns);
  void settle(SetState& set, Call& call);  // when complete: ready, grouped or failed
  Failure verdict(const SetState& set, Call& call) const;

  const Settings settings_;
  Outbox outbox_;
  SetTable sets_;
  OpenCalls calls_;
  StallMonitor stalls_;
  StepPredictor predictor_;
  BackendPolicy backends_;
  Publisher publisher_;
  GroupRules rules_;
  std::vector<RankGroup> groups_;
  int64_t now_ns_ = 0;  // of the last report or tick
  bool broken_ = false;
  bool stopped_ = false;
};

}  // namespace farandole
