// SPDX-License-Identifier: Apache-2.0
// Decides which calls are carried out, and in which order. RootController uses the coordinator on rank 0. The
// coordinator is a pure state machine: it takes reports and the time, and returns log entries. It has no threads,
// sockets or clocks. As in Horovod (Sergeev and Del Balso, 2018), ranks negotiate by name which tensors are ready.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "control/calls/member_mask.h"
#include "control/coordinator/messages.h"
#include "control/coordinator/open_calls.h"
#include "control/coordinator/publisher.h"
#include "control/coordinator/set_table.h"
#include "control/coordinator/stall_monitor.h"

namespace farandole {

// Only the driver may call these functions. Call receive(), receive_all(), lose() and tick() in any order, then
// publish() once per batch. After it has written an Abort, the coordinator ignores all reports except Leave, Lost and
// Forgot. After it has written Stop, it writes no more entries.
class Coordinator {
 public:
  using Settings = CoordinatorSettings;
  using LateRank = Outbox::LateRank;
  explicit Coordinator(Settings settings)
      : shared_(std::move(settings)),
        stalls_(shared_),
        publisher_(shared_),
        messages_(shared_, publisher_, stalls_) {}

  // Takes a report from one rank. Throws Error(kInternal) if a correct rank would not send such a report.
  void receive(Rank from, const Report& report, int64_t now_ns);
  // Registers ranks that may report together: those of a host and of its descendants in the tree of hosts. Returns the
  // number of this group.
  int add_group(std::vector<Rank> ranks);
  // Takes a ReadyMany, or a plain Ready with an id, on behalf of all ranks of the group that belong to the call's set.
  void receive_all(int group, const Report& report, int64_t now_ns);
  // Call this if a rank has died or cannot continue. The job then fails with this failure.
  void lose(Rank rank, Failure failure);
  // Call this after replacing a published entry with an Abort. The effect is as if the coordinator had written it.
  void stop_deciding() { broken_ = true; }
  // Checks for stalls. Call this when the time next_tick() has come.
  void tick(int64_t now_ns);
  int64_t next_tick() const;  // INT64_MAX if nothing waits

  // Replaces the content of `log` with the new entries, in order. Call this after a batch of reports, so that calls
  // that became ready in the batch can share a bucket.
  void publish(std::vector<Entry>& log);
  // Removes a process set that publish() has just opened, because there is no memory for the set.
  void withdraw_set(SetId id) { shared_.sets.erase(id); }
  // Returns the messages to users about stalls since the previous call of this function.
  std::vector<std::string> take_notices() { return shared_.outbox.take_notices(); }
  // Replaces the content of `into` with the ranks that were the last to report a call, one for each call completed
  // since the previous take_late_ranks(). Calls that were completed by receive_all() may be missing.
  void take_late_ranks(std::vector<LateRank>& into) { shared_.outbox.take_late_ranks(into); }

  // For tests and metrics.
  size_t definitions() const { return shared_.calls.registry().size(); }

 private:
  void fail_job(Failure failure);
  void take(Rank from, const Report& report, int64_t now_ns);
  bool take_due(int64_t now_ns);
  void ready(Rank from, const Ready& ready, int64_t now_ns);
  // Take plain contributions of a rank or a group. ready_at_once() returns false if the ranks must be taken one by one.
  void ready(Rank from, uint32_t id, int64_t now_ns);
  void ready(RankGroup& group, uint32_t id, uint64_t sequence, int64_t now_ns);
  void hear(RankGroup& group, SetId id, int64_t now_ns);
  bool ready_at_once(RankGroup& group, Definition& known, uint64_t sequence, int64_t now_ns);
  void arrived(SetState& set, Call& call, Rank from, int64_t now_ns);
  void judge(SetState& set, Call& call, Rank from);
  void refuse(Rank from, const Refuse& refuse, int64_t now_ns);
  void join(Rank from, const Join& join, int64_t now_ns);
  void done(Rank from, const Done& done);
  void leave(Rank from, const Leave& leave);
  Call& find_call(SetState& set, Definition& definition, const Request& request, uint64_t sequence,
                  int64_t now_ns);

  Shared shared_;
  StallMonitor stalls_;
  Publisher publisher_;
  Messages messages_;
  std::vector<RankGroup> groups_;
  int64_t now_ns_ = 0;  // time of the last report or tick
  bool broken_ = false;
  bool stopped_ = false;
};

}  // namespace farandole
