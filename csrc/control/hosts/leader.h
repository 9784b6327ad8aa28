// SPDX-License-Identifier: Apache-2.0
// What rank 0 does for all: feeds the coordinator with reports and publishes its log.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "control/coordinator/coordinator.h"
#include "control/hosts/host_leader.h"

namespace farandole {

class Leader final : public HostLeader {
 public:
  // A notice that some ranks wait for others; on the driver.
  using OnStall = std::function<void(const std::string&)>;
  // A rank was the last to be ready, so many nanoseconds after the first; on the driver.
  using OnLate = std::function<void(Rank, int64_t)>;
  Leader(Coordinator::Settings settings, Setup setup, OnStall on_stall, OnLate on_late);

  bool step() override;
  Deadline next_tick() const override { return Deadline::at(coordinator_.next_tick()); }

 private:
  template <class Receive>
  void receive(Rank from, ByteView message, Receive&& receive);
  void lose_for(Rank rank, const Error& error);
  void hear(Rank child, ByteView message);
  void publish_all();
  void prepare(Entry& entry);
  void answer_for_standing(const WhereAre& where);

  Coordinator coordinator_;
  OnStall on_stall_;
  OnLate on_late_;
  std::map<Rank, int> groups_;  // by child
  std::vector<Entry> entries_;
  std::vector<Coordinator::LateRank> late_;
  ByteString encoded_;
};

}  // namespace farandole
