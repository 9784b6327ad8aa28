// SPDX-License-Identifier: Apache-2.0
// The calls of one rank, from submission to outcome: state shared by submitting threads and the driver.
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

// One submission of a prepared call, with values for each tensor.
struct PreparedSubmission {
  const CheckedCall* call;
  std::span<const uintptr_t> inputs;  // addresses; 0: none
  std::span<const uintptr_t> outputs;
  std::span<const uint64_t> streams;  // empty: on the CPU
  std::span<Handle> handles;          // set by submit()
  std::vector<std::shared_ptr<GpuEvent>> produced =
      {};  // see Submission::produced; empty: on the CPU
  Submission submission() const;
};

// The end of one call of this rank in a bucket.
struct Ending {
  Submission submission;
  Outcome outcome;
  bool launched = false;  // on a GPU, the outcome is already published
  // Size of a result that the log carries.
  size_t bytes() const {
    size_t bytes = size_of(submission.recorded.dtype);
    for (int64_t n : outcome.shape) bytes *= static_cast<size_t>(n);
    return bytes;
  }
};

// A Run entry with this rank's buffers. At the bucket's end its calls end, and the coordinator learns it.
struct BegunRun {
  Done done;             // its end
  bool reports = false;  // true on the set's lowest member, which sends `done`
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
    bool gathered;      // see Reporter
    bool one_host;      // the whole job
    size_t tiny_bytes;  // see tiny_bytes()
    Recorder& recorder;
    Wakeup driver;
  };
  explicit RankCalls(Setup setup)
      : job(setup.driver),
        setup_(std::move(setup)),
        sets_(setup_.own),
        reporter_(setup_.channel, setup_.gathered) {}

  // Both have their own locks.
  Handles handles;
  JobState job;

  // ---- Users' threads. Methods that make calls throw kShutdown, or the job's failure, once the job has ended.
  // Set of a call to be made. Throws kInvalidArgument if this rank cannot make calls in it.
  ProcessSet set_of(const Request& request);
  std::optional<ProcessSet> find_set(SetId id);
  // Submits in order, up to the first that fails; throws its error, and reports it unless the name is in flight.
  void submit(std::span<PreparedSubmission> batch);
  // Makes one call and waits while its members complete it in a cell. False: it was submitted instead.
  bool call(PreparedSubmission& prepared);
  // Prepares a checked call for repeated submission.
  void prepare(CheckedCall& call);
  // Makes the peers' call of this name fail.
  void refuse(const Request& request, const Failure& why);
  // Throws kInvalidArgument if an earlier call of this rank uses memory to be copied from or, with `writes`, to.
  void check_unused(const Elements& elements, bool writes) {
    std::lock_guard lock(mutex_);
    if (const Handle user = memory_.user_of(elements, writes)) refuse_in_use("", find_key(user));
  }
  // Number of unnamed calls that this rank has made in the set.
  uint64_t count_unnamed(SetId set);
  // This rank leaves (see JobState): ends its calls in cells.
  void close();
  // Asks the coordinator for whom the call waits. Returns the question's number; 0: all ranks have submitted the call.
  uint64_t ask(Handle handle);
  // Asks the coordinator for any log entry. `stands_still`: a bucket of this rank; number 0: none.
  void ping(const Done& stands_still = {});
  // Key of a call that others may lack; nullopt: it has ended, or all ranks have submitted it.
  std::optional<CallKey> key_of(Handle handle);
  std::optional<std::string> answer(uint64_t number);
  // Time since this rank last completed a call in a cell; -1: never.
  int64_t direct_ago_ns() const { return direct_.ago_ns(); }
  // See Reporter. Skips the mutex if there is nothing to do.
  void expedite();

  // ---- Any thread
  // Sends one report to the coordinator at once.
  void report(const Report& report);
  bool take_news() { return reporter_.take_news(); }  // see Reporter

  // ---- Driver only. Reads requests and sets without the mutex, because only log entries change them.
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
  // `labelled`: fill in BegunRun::label.
  BegunRun begin(const Run& run, uint64_t log_position, const std::shared_ptr<GpuDevice>& device,
                 bool labelled);
  // Ends calls, each step for all: frees their names, informs the recorder, completes the handles. `failure`: of all
  // calls; null: see each outcome. `set`: a call of this set has ended, even if this rank had none.
  void settle(std::span<Ending> endings, const Failure* failure,
              std::optional<SetId> set = std::nullopt);
  // The bucket's first byte is about to move.
  void launched(BegunRun& run);
  // The bucket has ended: all bytes have moved, or it has failed.
  void settle(BegunRun& run, const Failure* failure);
  // On a GPU a call ends twice: launch() lets waiters continue, settle() frees the buffers.
  void launch(BegunRun& run, const std::shared_ptr<GpuEvent>& past);
  // Refuses new calls. Once nothing moves any more, clear() fails those that wait.
  void break_down(const Failure& failure);
  void clear(const Failure& failure);

 private:
  void check_open() const;
  // ---- Under the mutex
  void describe(CheckedCall& call);  // fills in what the recorder shows
  // Throws the error of a call that cannot be made, and reports it to peers unless the name is in flight.
  Submission checked(PreparedSubmission& prepared);
  void enter(PreparedSubmission& prepared, bool rides);
  void enter(const Request& request, Submission submission, bool rides);
  void note(const Request& request, Submission& submission, std::span<Handle> made);
  void tell_refusal(const Request& request, const Failure& why);
  void free_name(const Submission& submission);
  // ---- Driver only
  // `mine`: nullopt if this rank has no such call.
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
  uint64_t prepared_ = 0;                    // number of prepared calls
  size_t riders_ = 0;                        // calls under way; see Submission::rider
  std::vector<Ending> endings_;  // for the current log entry; driver only, not under the mutex
};

}  // namespace farandole
