// SPDX-License-Identifier: Apache-2.0
// The HostController of every host but the root's: passes reports up and the log down.
#pragma once

#include "control/hosts/aggregator.h"
#include "control/hosts/host_controller.h"

namespace farandole {

class HostRelay final : public HostController {
 public:
  explicit HostRelay(Setup setup);
  bool step() override;
  Deadline next_tick() const override { return Deadline::at(aggregator_.next_tick()); }

 private:
  void hear(Rank peer, ByteView message);
  void read_log(ByteView entries);
  void read(const Entry& entry);
  void report(Rank from, const Report& report);
  void close();

  Aggregator aggregator_;
  ByteString encoded_;
  bool over_ = false;  // Abort or Stop was read, or the link above was lost
};

}  // namespace farandole
