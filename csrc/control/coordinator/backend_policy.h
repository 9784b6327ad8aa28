// SPDX-License-Identifier: Apache-2.0
// How a process set's tensors on GPUs will travel, decided once for all its members before their first bucket: by
// NCCL or through host memory, and whether its communicator is split off the world's.
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

  // Said by every rank before its first tensor on a GPU.
  void describe(Rank from, const UseGpu& gpu) { gpus_[from] = gpu; }
  bool is_open(SetId set) const { return uses_nccl_.contains(set); }
  // Throws Error: what keeps the set from using GPUs together.
  void open(const SetState& set);
  void close(SetId set) { uses_nccl_.erase(set); }

 private:
  bool may_use_nccl(const SetState& set);
  bool may_split(const SetState& set) const;
  std::optional<std::pair<Rank, Rank>> sharing(const SetState& set) const;

  const CoordinatorSettings& settings_;
  SetTable& sets_;
  Outbox& outbox_;
  std::map<Rank, UseGpu> gpus_;
  std::map<SetId, bool> uses_nccl_;  // of the sets that are open
};

}  // namespace farandole
