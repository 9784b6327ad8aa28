// SPDX-License-Identifier: Apache-2.0
// Prediction: calls that a set repeats every step are grouped, and a member that is ready for a whole group
// reports it once. Only the reports change: in any irregular case a prediction is turned back into the
// reports of its calls.
#pragma once

#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <vector>

#include "control/calls/registry.h"
#include "control/coordinator/outbox.h"
#include "control/coordinator/set_table.h"
#include "control/coordinator/settings.h"

namespace farandole {

class StepPredictor {
 public:
  // Takes a report of one call that a rank has made through a prediction.
  using Receive = std::function<void(Rank, const Ready&, int64_t now_ns)>;
  StepPredictor(const CoordinatorSettings& settings, SetTable& sets, Registry& registry,
                Outbox& outbox, Receive receive);

  // ---- reports. False: it was passed on as the reports of its calls.
  bool ready(Rank from, const ReadyAll& ready, int64_t now_ns);
  // For all ranks of a group at once; false: nothing was done.
  bool ready(RankGroup& group, const ReadyAll& ready, int64_t now_ns);
  void withdraw(Rank from, const Withdraw& withdraw, int64_t now_ns);

  // ---- other events
  // A call of a prediction is about to be reported by itself: from now on the round is counted by calls.
  void take_apart(Definition& definition, int64_t now_ns);
  void dissolve(PredictedGroup& prediction, int64_t now_ns);
  void dissolve_all(const SetState& set, int64_t now_ns);
  // Learns that a call was published.
  void saw(SetState& set, const Call& call);
  // Makes predictions once the set has repeated a step often enough.
  void predict(SetState& set, int64_t now_ns);

  SetId set_of(uint32_t prediction) { return at(prediction).set; }
  size_t size() const { return predictions_.size(); }
  // Dissolves predictions that have waited too long.
  void tick(int64_t now_ns);
  int64_t next_tick() const { return next_tick_ns_; }  // INT64_MAX: nothing waits

 private:
  PredictedGroup& at(uint32_t id);
  void begin_round(PredictedGroup& prediction, int64_t now_ns);
  void complete_round(SetState& set, PredictedGroup& prediction);
  void spill(PredictedGroup& prediction, int64_t now_ns);
  bool may_be_predicted(const SetState& set, uint32_t id);
  void predicted_groups(SetState& set, std::vector<uint32_t> ids, size_t target, int64_t now_ns);
  void predicted_group(SetState& set, std::vector<uint32_t> ids, size_t bytes, int64_t now_ns);

  const CoordinatorSettings& settings_;
  SetTable& sets_;
  Registry& registry_;
  Outbox& outbox_;
  const Receive receive_;
  const int64_t patience_ns_;
  std::map<uint32_t, std::unique_ptr<PredictedGroup>> predictions_;
  uint32_t next_ = 1;
  int64_t next_tick_ns_ = std::numeric_limits<int64_t>::max();
};

}  // namespace farandole
