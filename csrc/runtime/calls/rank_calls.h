// SPDX-License-Identifier: Apache-2.0
// The calls of one rank, from submission to outcome. Submitting threads and the driver share this state.
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

// One submission of a prepared call, with an element for each tensor.
struct PreparedSubmission {
  const CheckedCall* call;
  std::span<const uintptr_t> inputs;  // addresses; 0 means none
  std::span<const uintptr_t> outputs;
  std::span<const uint64_t> streams;  // empty if the tensors are on the CPU
  std::span<Handle> handles;          // set by submit()
  std::vector<std::shared_ptr<GpuEvent>> produced =
      {};  // see Submission::produced; empty if the tensors are on the CPU
  Submission submission() const;
};

// A tensor of this rank whose call is about to end.
struct Ending {
  Submission submission;
  Outcome outcome;
  bool launched = false;  // launch() has published the outcome
  // Size in bytes of a result that came in the log.
  size_t bytes() const {
    size_t bytes = size_of(submission.recorded.dtype);
    for (int64_t n : outcome.shape) bytes *= static_cast<size_t>(n);
    return bytes;
  }
};

// A bucket (Run) with this rank's buffers.
struct BegunRun {
  Done done;                     // the report that the bucket has ended
  bool reports = false;          // true on the set's lowest member, which sends `done`
  std::vector<Rank> ranks = {};  // members of the set
  int64_t begun_ns = 0;
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
    bool one_host;      // all ranks of the job are on one host
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

  // ---- Users' threads. Once the job has ended, methods that make calls throw Error(kShutdown) or the job's failure.
  // Returns the set of a request. Throws Error(kInvalidArgument) if this rank cannot make calls in that set.
  ProcessSet set_of(const Request& request);
  std::optional<ProcessSet> find_set(SetId id);
  // See Runtime::submit(). Reports an error to the peers, unless the error is that the call's name is in flight.
  void submit(std::span<PreparedSubmission> batch);
  // Makes one call. Returns true if it has completed in a cell. Otherwise the caller must wait for the call's handle.
  bool call(PreparedSubmission& prepared);
  void prepare(CheckedCall& call);
  // Reports that this rank refused a call, which makes the peers' calls fail.
  void refuse(const Request& request, const Failure& why);
  // Throws Error(kInvalidArgument) if an earlier call conflicts with a copy from these elements (to them if `writes`).
  void check_unused(const Elements& elements, bool writes) {
    std::lock_guard lock(mutex_);
    if (const Handle user = memory_.user_of(elements, writes)) refuse_in_use("", find_key(user));
  }
  uint64_t count_unnamed(SetId set);
  // Makes this rank's threads leave all cells. Call it when this rank leaves the job.
  void close();
  // Asks the coordinator which ranks the call waits for. Returns the question's number, or 0 if no rank is missing.
  uint64_t ask(Handle handle);
  // Asks the coordinator for a log entry of any kind.
  void ping();
  // Returns the key of a call that other ranks may not have made yet. Returns nullopt if the call has ended or all
  // ranks have submitted it.
  std::optional<CallKey> key_of(Handle handle);
  std::optional<std::string> answer(uint64_t number);
  int64_t direct_ago_ns() const { return direct_.ago_ns(); }
  // See Reporter. Does not lock the mutex if there is nothing to do.
  void expedite();

  // ---- Any thread
  // Sends one report to the coordinator at once.
  void report(const Report& report);
  bool take_news() { return reporter_.take_news(); }  // see Reporter

  // ---- Driver only. These read requests and sets without the mutex, because only log entries change them.
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
  // `device` is used for outputs on a GPU.
  void on(const Result& result, uint64_t log_position, const std::shared_ptr<GpuDevice>& device);
  // If `labelled` is true, fills in BegunRun::label.
  BegunRun begin(const Run& run, uint64_t log_position, const std::shared_ptr<GpuDevice>& device,
                 bool labelled);
  // Ends calls: frees all names, informs the recorder, then completes all handles. If `failure` is not null, all these
  // calls fail with it; otherwise each outcome has its own failure. If `set` is given, a call of this set has ended,
  // even if this rank has not made that call.
  void settle(std::span<Ending> endings, const Failure* failure,
              std::optional<SetId> set = std::nullopt);
  // Call this before the first byte of the bucket moves.
  void launched(BegunRun& run);
  // Call this when all bytes of the bucket have moved, or when the bucket has failed.
  void settle(BegunRun& run, const Failure* failure);
  // Lets the waiters for a bucket on a GPU return. The bucket's buffers stay in use until settle() is called.
  void launch(BegunRun& run, const std::shared_ptr<GpuEvent>& past);
  // break_down() makes new calls fail. Later, when no lane moves data any more, clear() makes the waiting calls fail.
  void break_down(const Failure& failure);
  void clear(const Failure& failure);

 private:
  void check_open() const;
  // ---- The caller holds the mutex
  void describe(CheckedCall& call);
  // Throws an error if the call cannot be made. Reports it to the peers, unless the call's name is in flight.
  Submission checked(PreparedSubmission& prepared);
  void enter(PreparedSubmission& prepared, bool rides);
  void enter(const Request& request, Submission submission, bool rides);
  void note(const Request& request, Submission& submission, std::span<Handle> made);
  void tell_refusal(const Request& request, const Failure& why);
  void free_name(const Submission& submission);
  // ---- Driver only
  // Does nothing if `mine` is nullopt, which means that this rank has no such call.
  void finish(std::optional<Submission> mine, Outcome outcome);
  void fail(Submission mine, const Failure& failure);
  void end(Submission call);

  const Setup setup_;
  std::mutex mutex_;  // guards everything below
  PendingTable pending_;
  NumberedCalls posted_;  // sends and receives
  ProcessSets sets_;
  Reporter reporter_;
  MemoryInUse memory_{setup_.own};
  DirectCalls direct_{{handles, job, setup_.recorder, pending_, sets_, memory_}};
  std::optional<CallKey> find_key(Handle handle) const;  // the caller holds the mutex

  uint64_t asked_ = 0;                       // number of questions (Inquire) asked so far
  std::map<uint64_t, std::string> answers_;  // indexed by the question's number
  uint64_t prepared_ = 0;                    // number of prepared calls so far
  size_t riders_ = 0;            // number of calls under way that have Submission::rider set
  std::vector<Ending> endings_;  // calls that end now; the driver uses them without the mutex
};

}  // namespace farandole
