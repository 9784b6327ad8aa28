// SPDX-License-Identifier: Apache-2.0
// The calls of one rank, from submission to outcome: the state that submitting threads and the driver share.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "data/backend/backend.h"
#include "runtime/calls/direct.h"
#include "runtime/calls/handles.h"
#include "runtime/calls/job_state.h"
#include "runtime/calls/memory_in_use.h"
#include "runtime/calls/request_checks.h"
#include "runtime/calls/tables.h"

namespace farandole {

// One submission of a prepared call, with a place for each of its tensors.
struct PreparedSubmission {
  const CheckedCall* call;
  std::span<const uintptr_t> inputs;  // addresses; 0: none
  std::span<const uintptr_t> outputs;
  std::span<const uint64_t> streams;                     // empty: on the CPU
  std::span<Handle> handles;                             // set by submit()
  std::vector<std::shared_ptr<GpuEvent>> produced = {};  // as Submission's; empty: on the CPU
  Submission submission() const;
};

// What happens to one call of this rank when its bucket ends.
struct Ending {
  Submission submission;
  Outcome outcome;
  bool launched = false;  // on a GPU: the outcome was published already
  // Belongs to a result that the log carries.
  size_t bytes() const {
    size_t bytes = size_of(submission.recorded.dtype);
    for (int64_t n : outcome.shape) bytes *= static_cast<size_t>(n);
    return bytes;
  }
};

// A Run entry as this rank's buffers. When the bucket ends, its calls end, and the coordinator hears of it.
struct BegunRun {
  Done done;             // its end
  bool reports = false;  // this is the set's lowest member, which reports that
  std::vector<Part> parts = {};
  std::vector<Ending> endings = {};
  std::string label = {};  // "bucket 7: conv.weight, conv.bias and 3 more", for profilers
  uint64_t bytes = 0;
  int64_t launched_ns = 0;
};

class RankCalls {
 public:
  struct Setup {
    Rank own;
    MemberChannel& channel;
    bool gathered;  // see Reporter
    bool one_host;  // the whole job
    Recorder& recorder;
    EventCount& driver;
  };
  explicit RankCalls(Setup setup)
      : job(setup.driver),
        setup_(std::move(setup)),
        sets_(setup_.own),
        reporter_(setup_.channel, setup_.gathered) {}

  // These have locks of their own.
  Handles handles;
  JobState job;

  // ---- Users' threads. What makes calls throws kShutdown or the job's failure once there can be none.
  // The set of a call that is to be made. Throws kInvalidArgument if this rank makes none in it.
  ProcessSet set_of(const Request& request);
  // nullopt: no such set.
  std::optional<ProcessSet> find_set(SetId id);
  // In order, up to the first that fails, whose error it throws, and tells peers unless its name is in flight.
  void submit(std::span<PreparedSubmission> batch);
  // Makes one call, and waits while the members of its set complete it among themselves. False: it is submitted.
  bool call(PreparedSubmission& prepared);
  // Gives a checked call what it needs to be submitted repeatedly.
  void prepare(CheckedCall& call);
  // The peers' call of this name fails.
  void refuse(const Request& request, const Failure& why);
  // Throws kInvalidArgument if an earlier call of this rank uses memory that is about to be copied from or, with
  // `writes`, to.
  void check_unused(const Elements& elements, bool writes) {
    std::lock_guard lock(mutex_);
    if (const Handle user = memory_.user_of(elements, writes)) refuse_in_use("", find_key(user));
  }
  // The number of unnamed calls that this rank has made in the set.
  uint64_t count_unnamed(SetId set);
  // This rank leaves (see JobState): ends what it has in cells.
  void close();
  // Asks the coordinator whom the call waits for; the number of the question. 0: all ranks have submitted it.
  uint64_t ask(Handle handle);
  // Asks it for any entry of the log.
  void ping();
  // The call that others may lack; nullopt: it has ended, or all ranks have submitted it.
  std::optional<CallKey> key_of(Handle handle);
  // nullopt: no answer yet.
  std::optional<std::string> answer(uint64_t number);
  // Time since this rank completed its last call without the coordinator; -1: it has made none.
  int64_t direct_ago_ns() const { return direct_.ago_ns(); }
  // See Reporter. Skips the mutex when there is nothing to do.
  void expedite();

  // ---- Any thread
  // Sends one report to the coordinator at once.
  void report(const Report& report);
  bool take_news() { return reporter_.take_news(); }  // see Reporter

  // ---- The driver. It reads requests and sets without the mutex, because only log entries change them.
  bool flush();  // see Reporter
  void on(const Define& define);
  void on(const Forget& forget);
  void on(const Fail& fail);
  void on(const Joined& joined);
  void on(const Matched& matched);
  void on(const OpenSet& open);
  void use(SetId set, std::shared_ptr<Cell> cell);
  void on(const CloseSet& close);
  void on(const Answer& answer);
  // `device`: for outputs on a GPU.
  void on(const Result& result, uint64_t log_position, const std::shared_ptr<GpuDevice>& device);
  // `labelled`: wants BegunRun::label.
  BegunRun begin(const Run& run, uint64_t log_position, const std::shared_ptr<GpuDevice>& device,
                 bool labelled);
  // Ends calls: frees their names, tells the recorder, completes the handles. Each step for all at once.
  // `failure`: of all; null: see each outcome. `set`: a call of this set has ended, also if this rank had none.
  void settle(std::span<Ending> endings, const Failure* failure,
              std::optional<SetId> set = std::nullopt);
  // A bucket's first byte is about to move.
  void launched(BegunRun& run);
  // It has ended: all its bytes have moved, or it has failed.
  void settle(BegunRun& run, const Failure* failure);
  // On a GPU a call ends twice: launch() lets waiters continue, settle() frees the buffers.
  void launch(BegunRun& run, const std::shared_ptr<GpuEvent>& past);
  // Refuses new calls; once nothing moves any more, clear() fails what waits.
  void break_down(const Failure& failure);
  void clear(const Failure& failure);

 private:
  void check_open() const;
  // ---- Under the mutex
  void describe(CheckedCall& call);  // fills in what the recorder shows
  // Throws the error of a call that cannot be made, and tells the peers unless its name is in flight.
  Submission checked(PreparedSubmission& prepared);
  void enter(PreparedSubmission& prepared, bool rides);
  void enter(const Request& request, Submission submission, bool rides);
  void note(const Request& request, Submission& submission, std::span<Handle> made);
  void tell_refusal(const Request& request, const Failure& why);
  void free_name(const Submission& submission);
  // ---- The driver
  // nullopt: this rank has no such call.
  void finish(std::optional<Submission> mine, Outcome outcome);
  void fail(Submission mine, const Failure& failure);
  void end(Submission call);

  const Setup setup_;
  std::mutex mutex_;  // guards all below
  PendingTable pending_;
  NumberedCalls posted_;  // sends and receives
  ProcessSets sets_;
  Reporter reporter_;
  MemoryInUse memory_{setup_.own};
  DirectCalls direct_{{handles, job, setup_.recorder, pending_, sets_}};
  std::optional<CallKey> find_key(Handle handle) const;  // under the mutex

  uint64_t asked_ = 0;                       // questions to the coordinator (Inquire)
  std::map<uint64_t, std::string> answers_;  // by the question's number
  uint64_t prepared_ = 0;                    // how many calls are
  size_t riders_ = 0;                        // calls under way, see Submission
  std::vector<Ending> endings_;  // of the entry that the driver reads; not under the mutex
};

}  // namespace farandole
