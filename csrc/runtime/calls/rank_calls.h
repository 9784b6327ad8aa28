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
  std::span<const uintptr_t> inputs;  // addresses; 0: none
  std::span<const uintptr_t> outputs;
  std::span<const uint64_t> streams;  // empty: tensors are on the CPU
  std::span<Handle> handles;          // set by submit()
  std::vector<std::shared_ptr<GpuEvent>> produced =
      {};  // see Submission::produced; empty: tensors are on the CPU
  Submission submission() const;
};

// A tensor of this rank whose call is about to end.
struct Ending {
  Submission submission;
  Outcome outcome;
  bool launched = false;  // launch() has published the outcome
  // Bytes of a result that came in the log.
  size_t bytes() const {
    size_t bytes = size_of(submission.recorded.dtype);
    for (int64_t n : outcome.shape) bytes *= static_cast<size_t>(n);
    return bytes;
  }
};

// A bucket (Run) with this rank's buffers.
struct BegunRun {
  Done done;                     // the report that it has ended
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

  // ---- Users' threads. Once the job has ended, methods that make calls throw Error(kShutdown) or the job's failure.
  // Returns the set of a request. Throws Error(kInvalidArgument) if this rank cannot make calls in it.
  ProcessSet set_of(const Request& request);
  std::optional<ProcessSet> find_set(SetId id);
  // See Runtime::submit(). Reports the error, unless the call's name is in flight.
  void submit(std::span<PreparedSubmission> batch);
  // Makes one call, and waits until it completes in a cell. False: it was submitted instead.
  bool call(PreparedSubmission& prepared);
  void prepare(CheckedCall& call);
  // Makes the peers' calls fail.
  void refuse(const Request& request, const Failure& why);
  // Throws Error(kInvalidArgument) if an earlier call conflicts with a copy from (`writes`: to) these elements.
  void check_unused(const Elements& elements, bool writes) {
    std::lock_guard lock(mutex_);
    if (const Handle user = memory_.user_of(elements, writes)) refuse_in_use("", find_key(user));
  }
  uint64_t count_unnamed(SetId set);
  // Call when this rank leaves: ends its calls in cells.
  void close();
  // Asks the coordinator which ranks the call waits for. Returns the question's number; 0: all have submitted the call.
  uint64_t ask(Handle handle);
  // Asks the coordinator for any log entry.
  void ping();
  // Key of a call that other ranks may not have made; nullopt: the call has ended, or all ranks have submitted it.
  std::optional<CallKey> key_of(Handle handle);
  std::optional<std::string> answer(uint64_t number);
  int64_t direct_ago_ns() const { return direct_.ago_ns(); }
  // See Reporter. Takes no mutex if there is nothing to do.
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
  // `device`: for outputs on a GPU.
  void on(const Result& result, uint64_t log_position, const std::shared_ptr<GpuDevice>& device);
  // `labelled`: fill in BegunRun::label.
  BegunRun begin(const Run& run, uint64_t log_position, const std::shared_ptr<GpuDevice>& device,
                 bool labelled);
  // Ends calls: frees all names, informs the recorder, then completes all handles. `failure`: applies to all calls; if
  // null, each outcome has its own failure. `set`: a call of this set has ended, even if this rank has not made it.
  void settle(std::span<Ending> endings, const Failure* failure,
              std::optional<SetId> set = std::nullopt);
  // Call before the bucket's first byte moves.
  void launched(BegunRun& run);
  // Call when all bytes of the bucket have moved, or it has failed.
  void settle(BegunRun& run, const Failure* failure);
  // For a bucket on a GPU: launch() lets waiters return; later, settle() frees the buffers.
  void launch(BegunRun& run, const std::shared_ptr<GpuEvent>& past);
  // break_down() makes new calls fail. Later, when no lane moves data, clear() makes the waiting calls fail.
  void break_down(const Failure& failure);
  void clear(const Failure& failure);

 private:
  void check_open() const;
  // ---- The caller holds the mutex
  void describe(CheckedCall& call);
  // Throws an error if the call cannot be made, and reports it to peers unless the name is in flight.
  Submission checked(PreparedSubmission& prepared);
  void enter(PreparedSubmission& prepared, bool rides);
  void enter(const Request& request, Submission submission, bool rides);
  void note(const Request& request, Submission& submission, std::span<Handle> made);
  void tell_refusal(const Request& request, const Failure& why);
  void free_name(const Submission& submission);
  // ---- Driver only
  // `mine`: nullopt: this rank has no such call.
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
  std::optional<CallKey> find_key(Handle handle) const;  // the caller holds the mutex

  uint64_t asked_ = 0;                       // number of questions (Inquire) so far
  std::map<uint64_t, std::string> answers_;  // by the question's number
  uint64_t prepared_ = 0;                    // number of prepared calls so far
  size_t riders_ = 0;                        // calls under way with Submission::rider
  std::vector<Ending> endings_;  // of the current log entry; the driver uses it without the mutex
};

}  // namespace farandole
