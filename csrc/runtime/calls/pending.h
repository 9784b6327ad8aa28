// SPDX-License-Identifier: Apache-2.0
// What this rank has submitted and what the log has taught it: which request each id stands for.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "control/protocol/message.h"
#include "runtime/calls/handles.h"
#include "watch/recorder.h"

namespace farandole {

class GpuEvent;

// One tensor on its way, as this rank submitted it.
struct Submission {
  Handle handle = 0;
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  Dimensions shape;             // of the input, with its own first dimension
  std::vector<int64_t> splits;  // as in Contribution
  int32_t device = kCpuDevice;
  uint64_t stream = 0;                   // on which the buffers are produced
  std::shared_ptr<GpuEvent> produced;    // there
  struct NamedRequest* named = nullptr;  // as check_free() or submit() has found it
  uint64_t kept = 0;                     // number of the kept request that it repeats; 0: none
  uint64_t place = 0;                    // in an unnamed group, after its first
  RecordedCall recorded;
};

// A name that this rank uses.
struct NamedRequest {
  NamedRequest(SetId its_set, std::string its_name) : set(its_set), name(std::move(its_name)) {}
  const SetId set;  // with `name` its place in the table
  const std::string name;
  bool listed = true;  // in the table
  uint32_t id = 0;     // as the log says; 0: not yet, or not any more
  uint64_t same = 0;   // the id stands for the very request that was kept as this number
  bool in_flight = false;
  bool reported = false;  // in flight, and not yet seen in the log
  Submission submission;

  // A refusal is this rank's report of one call. Until the log has answered it, what this rank does next
  // under the name stays here: further refusals, then the submission that is in flight.
  bool refused = false;
  std::deque<Failure> refusals;
  struct Held {
    Request request;
    Contribution contribution;
  };
  std::optional<Held> held;
  std::deque<Failure> later;  // refusals of what would have come after the call that is in flight
  std::vector<std::string> followers;  // that wait for the same: if it is the first of a group
  bool idle() const { return !in_flight && !refused; }
};

// A call was made twice under one name at once: its peers need not hear of that, they make it once.
struct NameTaken : Error {
  using Error::Error;
};

// Not thread-safe: the runtime holds its mutex.
class PendingTable {
 public:
  bool in_flight(const Request& request) const;
  // Throws NameTaken(kInvalidArgument) if a call of this name is in flight already. Before submit().
  // record: the name's as a kept request remembers it; empty, or not listed any more: it is looked up.
  void check_free(const Request& request, Submission& submission,
                  std::shared_ptr<NamedRequest>& record) const;
  uint64_t number_kept() { return ++kept_; }
  // What tells the next unnamed call of this set from all others. place: in its group, after the first, which
  // has been submitted then.
  uint64_t next_unnamed(SetId set, uint64_t place = 0);
  // Both return the report that tells the coordinator; nullopt: fail() will, once it may be told.
  std::optional<Report> submit(const Request& request, Submission submission,
                               Contribution contribution);
  // The same where an id says all that there is to report but the contribution: that id. 0: nothing was
  // done, submission is as it was.
  uint32_t submit_known(const Request& request, Submission& submission);
  std::optional<Report> refuse(const Request& request, Failure failure);

  // The call that this handle waits for; nullopt: the log has settled it already.
  std::optional<CallKey> key_of(Handle handle) const;

  // ---- the log
  void define(const Define& define);
  void forget(uint32_t id);
  const Request& request_of(uint32_t id) const { return known(id).request; }
  // A named call of this id has been submitted, and the log has not settled it.
  bool under_way(uint32_t id) const;
  // This rank's part of a call that the log settles; nullopt: it did not submit (it has joined).
  std::optional<Submission> take(uint32_t id, uint64_t sequence);
  std::optional<Submission> take(const CallKey& key);
  // This rank's part of a call that failed; or the answer to its refusal: then what is in `next` may be
  // reported. joined: this rank reports nothing any more.
  std::optional<Submission> fail(const CallKey& key, bool joined, std::vector<Report>& next);
  // The call is over: its name is free again. Returns the report of what was refused meanwhile.
  std::optional<Report> finish(const Submission& submission);
  void resume(SetId set, uint64_t next_sequence);  // after join
  // The job is broken: nothing of this will be settled.
  void clear();

 private:
  struct UnnamedCalls {
    uint64_t next = 0;
    std::map<uint64_t, Submission> waiting;
  };
  // What an id stands for.
  struct Known {
    Request request;
    NamedRequest* named = nullptr;  // its record, if it has a name
  };
  static std::string interned_key(const Request& request);
  NamedRequest& named(const Request& request);
  Ready ready_of(NamedRequest& record, const Request& request, Contribution contribution) const;
  bool stands_for(NamedRequest& record, const Request& request, uint64_t kept) const;
  const Known& known(uint32_t id) const;
  std::optional<Submission> take(NamedRequest* record);
  NamedRequest* refused_first(const Request& request) const;
  void drop_unknown(const NamedRequest& record);

  std::shared_ptr<NamedRequest> find(SetId set, const std::string& name) const;  // null: unknown

  std::map<SetId, std::unordered_map<std::string, std::shared_ptr<NamedRequest>>> named_;
  std::map<SetId, UnnamedCalls> unnamed_;
  std::unordered_map<std::string, uint32_t> interned_;  // signatures of unnamed calls
  std::vector<std::optional<Known>> by_id_;
  uint64_t kept_ = 0;
  size_t refusals_ = 0;  // records that are refused
};

}  // namespace farandole
