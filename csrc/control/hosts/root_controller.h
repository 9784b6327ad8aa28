// SPDX-License-Identifier: Apache-2.0
// The HostController of rank 0: feeds reports to the coordinator and publishes its log.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "control/coordinator/coordinator.h"
#include "control/hosts/host_controller.h"

namespace farandole {

class RootController final : public HostController {
 public:
  // Called on the driver with a stall warning.
  using OnStall = std::function<void(const std::string&)>;
  // Called on the driver: this rank was the last to be ready, by so many nanoseconds.
  using OnLate = std::function<void(Rank, int64_t)>;
  RootController(Coordinator::Settings settings, Setup setup, OnStall on_stall, OnLate on_late);

  bool step() override;
  Deadline next_tick() const override { return Deadline::at(coordinator_.next_tick()); }

 private:
  template <class Receive>
  void receive(Rank from, ByteView message, Receive&& receive);
  void hear(Rank child, ByteView message);
  void publish_all();
  void prepare(Entry& entry);

  Coordinator coordinator_;
  OnStall on_stall_;
  OnLate on_late_;
  std::map<Rank, int> groups_;  // by child leader
  std::vector<Entry> entries_;
  std::vector<Coordinator::LateRank> late_;
  ByteString encoded_;
};

}  // namespace farandole
