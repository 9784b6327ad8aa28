// SPDX-License-Identifier: Apache-2.0
// Prediction. What a set repeats step after step is cut into bundles, and a member that is ready for all of one says
// so once. A bundle changes how readiness is told and nothing else: whatever is irregular is turned back into the
// reports that it stands for.
#pragma once

#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <vector>

#include "control/calls/open_bundle.h"
#include "control/calls/registry.h"
#include "control/coordinator/outbox.h"
#include "control/coordinator/set_table.h"
#include "control/coordinator/settings.h"

namespace farandole {

class StepPredictor {
 public:
  // Takes a report that a rank has made by way of a bundle.
  using Receive = std::function<void(Rank, const Ready&, int64_t now_ns)>;
  StepPredictor(const CoordinatorSettings& settings, SetTable& sets, Registry& registry,
                Outbox& outbox, Receive receive);

  // ---- reports. False: it was taken as the reports that it stands for.
  bool ready(Rank from, const ReadyAll& ready, int64_t now_ns);
  // Of all ranks of a group at once; false: nothing was done.
  bool ready(RankGroup& group, const ReadyAll& ready, int64_t now_ns);
  void split(Rank from, const Split& split, int64_t now_ns);

  // ---- what else happens to calls
  // A bundled call, which is not open, is about to be reported by itself: so are all of its bundle then.
  void take_apart(Definition& definition, int64_t now_ns);
  void unbundle(OpenBundle& bundle, int64_t now_ns);
  void unbundle_all(const SetState& set, int64_t now_ns);
  // A call was published.
  void saw(SetState& set, const Call& call);
  // Bundles what a set has repeated often enough.
  void predict(SetState& set, int64_t now_ns);

  SetId set_of(uint32_t bundle) { return at(bundle).set; }
  size_t size() const { return bundles_.size(); }
  // Ends bundles that have waited for too long.
  void tick(int64_t now_ns);
  int64_t next_tick() const { return next_tick_ns_; }  // INT64_MAX: nothing waits

 private:
  OpenBundle& at(uint32_t id);
  void begin_round(OpenBundle& bundle, int64_t now_ns);
  void complete_round(SetState& set, OpenBundle& bundle);
  void spill(OpenBundle& bundle, int64_t now_ns);
  bool may_be_bundled(const SetState& set, uint32_t id);
  void open_bundles(SetState& set, std::vector<uint32_t> ids, size_t target, int64_t now_ns);
  void open_bundle(SetState& set, std::vector<uint32_t> ids, size_t bytes, int64_t now_ns);

  const CoordinatorSettings& settings_;
  SetTable& sets_;
  Registry& registry_;
  Outbox& outbox_;
  const Receive receive_;
  const int64_t patience_ns_;
  std::map<uint32_t, std::unique_ptr<OpenBundle>> bundles_;
  uint32_t next_ = 1;
  int64_t next_tick_ns_ = std::numeric_limits<int64_t>::max();
};

}  // namespace farandole
