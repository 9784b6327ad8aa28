// SPDX-License-Identifier: Apache-2.0
// A rank's reports on their way to the coordinator. Prediction withholds some until a bundle of them is whole.
#pragma once

#include <atomic>
#include <span>
#include <vector>

#include "control/channel/channel.h"
#include "control/prediction/bundler.h"
#include "runtime/calls/handles.h"

namespace farandole {

// Not thread-safe, but for what is marked so: it is used under the mutex of RankCalls.
class Reporter {
 public:
  // gathered: on the way to the coordinator, leaders of hosts keep reports back for a moment.
  Reporter(MemberChannel& channel, bool gathered) : channel_(channel), gathered_(gathered) {}

  // Rings nobody. `handle`: that the call will end; 0: none.
  void pass(Report&& report, Handle handle);
  // The same for a Ready of this id.
  void pass_known(uint32_t id, Contribution&& given, Handle handle);
  // At once: the leader is rung.
  void send(Report report);
  // Somebody needs these handles now: no report of theirs is withheld any longer.
  void await(std::span<const Handle> handles);
  // Somebody waits: on its way to the coordinator nothing of this rank is kept back, until its next call.
  void hurry();
  // Any thread: whether await() or hurry() would do something.
  bool withholds() const { return withheld_ != 0; }
  bool may_hurry() const { return gathered_ && !hurried_; }
  // Any thread: something has been passed since the last time, so the leader wants to be rung.
  bool take_news() { return news_.exchange(false); }
  // Reports that found the ring full; false: it is still.
  bool flush();

  // ---- the log. A bundle's calls are known by their ids.
  void open(const Bundle& bundle, const std::function<bool(uint32_t)>& under_way);
  void close(const Unbundle& unbundle);
  // By the driver alone, who reads what changes them: without the mutex.
  const std::vector<uint32_t>& ids_of(uint32_t bundle) const { return bundler_.ids_of(bundle); }
  // The job is broken.
  void clear();

 private:
  void send_passed();
  void ring();

  MemberChannel& channel_;
  const bool gathered_;
  Bundler bundler_;
  std::vector<Report> passed_;
  ByteString encoded_;
  std::atomic<int> withheld_{0};  // calls
  std::atomic<bool> hurried_{false};
  std::atomic<bool> news_{false};
};

}  // namespace farandole
