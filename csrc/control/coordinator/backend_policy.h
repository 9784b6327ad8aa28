// SPDX-License-Identifier: Apache-2.0
// Decides, once per process set and before its first GPU bucket, how its GPU tensors travel; then passes on the
// steps of its backend's set-up, each when all members have asked for it.
#pragma once

#include <map>
#include <optional>
#include <utility>

#include "control/coordinator/outbox.h"
#include "control/coordinator/set_table.h"
#include "control/coordinator/settings.h"

namespace farandole {

class BackendPolicy {
 public:
  BackendPolicy(const CoordinatorSettings& settings, SetTable& sets, Outbox& outbox)
      : settings_(settings), sets_(sets), outbox_(outbox) {}

  // Every rank reports its GPU before its first GPU tensor.
  void describe(Rank from, const UseGpu& gpu) { gpus_[from] = gpu; }
  bool is_open(SetId set) const { return open_.contains(set); }
  // Throws Error with the reason if the set can't use GPUs together.
  void open(const SetState& set);
  void ask(const SetState& set, Rank from, const SetUp& step);
  void close(SetId set) { open_.erase(set); }

 private:
  struct PendingStep {
    int members = 0;
    std::string bytes;
  };
  BackendKind backend_of(const SetState& set);
  std::optional<std::pair<Rank, Rank>> sharing(const SetState& set) const;

  const CoordinatorSettings& settings_;
  SetTable& sets_;
  Outbox& outbox_;
  std::map<Rank, UseGpu> gpus_;
  std::map<SetId, std::map<std::string, PendingStep>>
      open_;  // steps that some members have asked for
};

}  // namespace farandole
