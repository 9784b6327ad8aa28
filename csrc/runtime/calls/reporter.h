// SPDX-License-Identifier: Apache-2.0
// How a rank's reports reach the coordinator. Those of a predicted group are withheld until all its calls are
// ready, then one ReadyAll replaces them: to the coordinator they just come late, all at once.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <vector>

#include "control/channel/shm_channel.h"
#include "control/protocol/message.h"
#include "runtime/calls/handles.h"

namespace farandole {

// A rank's side of prediction, through which all its reports pass. No threads, clocks or channels inside, so
// that the simulator runs it too.
class ReportCombiner {
 public:
  // Starts a prediction of one of this rank's sets. `under_way(id)`: this rank has reported such a call and
  // the log has not settled it; the current round then runs without the prediction.
  void open(const Predict& prediction, const std::function<bool(uint32_t)>& under_way);
  // Takes a report and the handle that it completes (0: none); appends what to send now.
  void pass(Report&& report, int64_t handle, std::vector<Report>& out);
  // Like pass() of a plain Ready with this id, if the id is in an active prediction; false: nothing was done.
  bool withhold(uint32_t id, int64_t handle, std::vector<Report>& out);
  // A user waits for these handles: sends what is withheld of their predictions.
  void await(std::span<const int64_t> handles, std::vector<Report>& out);
  // The log has a Dissolve for it.
  void close(uint32_t prediction, std::vector<Report>& out);
  // The job has failed: drops everything.
  void clear();

  const std::vector<uint32_t>& ids_of(uint32_t prediction) const;
  int withheld() const { return withheld_; }  // calls

 private:
  enum class State : uint8_t {
    kJoining,  // each call is reported by itself once more
    kActive,
    kGivenUp,  // Withdraw was sent; waits for Dissolve
  };
  struct Withheld {
    int32_t position;
    int64_t handle;
  };
  struct Opened {
    uint32_t id = 0;
    std::vector<uint32_t> ids;
    State state = State::kActive;
    std::vector<bool> seen;  // by position; used while joining
    size_t seen_count = 0;
    std::vector<Withheld> withheld;  // in order of submission
  };
  struct Membership {
    Opened* prediction = nullptr;
    int32_t position = 0;
  };

  Membership membership_of(uint32_t id) const {
    return id < memberships_.size() ? memberships_[id] : Membership{};
  }
  void pass_ready(Ready&& ready, int64_t handle, std::vector<Report>& out);
  static void join(Opened& prediction, int32_t position);
  void give_up(Opened& prediction, bool awaited, std::vector<Report>& out);

  std::map<uint32_t, Opened> predictions_;
  std::vector<Membership> memberships_;  // by request id
  int withheld_ = 0;
};

// Sends them. Under RankCalls::mutex, except where marked.
class Reporter {
 public:
  // `gathered`: leaders between this rank and the coordinator hold reports back for a moment.
  Reporter(MemberChannel& channel, bool gathered) : channel_(channel), gathered_(gathered) {}

  // Does not wake the leader. `handle`: completed by the call; 0: none.
  void pass(Report&& report, Handle handle);
  // The same for a Ready with this id.
  void pass_known(uint32_t id, Contribution&& given, Handle handle);
  // Wakes the leader.
  void send(Report report);
  // A user needs these handles: sends their withheld reports.
  void await(std::span<const Handle> handles);
  // A user waits: leaders hold back no report of this rank until its next call.
  void expedite();
  // Any thread: whether await() or expedite() would do something.
  bool withholds() const { return withheld_ != 0; }
  bool may_expedite() const { return gathered_ && !expedited_; }
  // Any thread: whether something was passed since the last call, so that the leader has to be woken.
  bool take_news() { return news_.exchange(false); }
  // Retries reports that found the ring full; false: it still is.
  bool flush();

  // ---- For log entries. The calls of a prediction are known by their ids.
  void open(const Predict& prediction, const std::function<bool(uint32_t)>& under_way);
  void close(const Dissolve& dissolve);
  // The driver, without the mutex: only log entries change this, and only the driver reads them.
  const std::vector<uint32_t>& ids_of(uint32_t prediction) const {
    return report_combiner_.ids_of(prediction);
  }
  // The job has failed.
  void clear();

 private:
  void send_passed();
  void ring();

  MemberChannel& channel_;
  const bool gathered_;
  ReportCombiner report_combiner_;
  std::vector<Report> passed_;
  ByteString encoded_;
  std::atomic<int> withheld_{0};  // calls
  std::atomic<bool> expedited_{false};
  std::atomic<bool> news_{false};
};

}  // namespace farandole
