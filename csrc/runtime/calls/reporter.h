// SPDX-License-Identifier: Apache-2.0
// How a rank's reports reach the coordinator. Calls that a rank submits together leave in one report.
#pragma once

#include <atomic>
#include <cstdint>

#include "control/channel/shm_channel.h"
#include "control/protocol/message.h"

namespace farandole {

// Under RankCalls::mutex, except where marked.
class Reporter {
 public:
  // `gathered`: leaders between this rank and the coordinator hold reports back for a moment.
  Reporter(MemberChannel& channel, bool gathered) : channel_(channel), gathered_(gathered) {}

  // Does not wake the leader.
  void pass(const Report& report);
  // The same for a Ready with this id. If its contribution is plain it waits for pass_batch(), at the latest for
  // the next report.
  void pass_known(uint32_t id, Contribution&& given);
  void pass_batch();
  // Wakes the leader.
  void send(const Report& report);
  // A user waits: leaders hold back no report of this rank until its next call.
  void expedite();
  // Any thread: whether expedite() would do something.
  bool may_expedite() const { return gathered_ && !expedited_; }
  // Any thread: whether something was passed since the last call, so that the leader has to be woken.
  bool take_news() { return news_.exchange(false); }
  // Retries reports that found the ring full; false: it still is.
  bool flush();

 private:
  void write(const Report& report);

  MemberChannel& channel_;
  const bool gathered_;
  Report batch_ = ReadyMany{};
  ByteString encoded_;
  std::atomic<bool> expedited_{false};
  std::atomic<bool> news_{false};
};

}  // namespace farandole
