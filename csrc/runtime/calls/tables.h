// SPDX-License-Identifier: Apache-2.0
// A rank's process sets, submitted calls, and requests that have ids. Parts of RankCalls, whose mutex the caller holds.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "control/channel/shm_channel.h"
#include "control/protocol/message.h"
#include "data/shm/cell.h"
#include "runtime/calls/handles.h"
#include "watch/recorder.h"

namespace farandole {

struct ProcessSet {
  std::vector<Rank> ranks;       // ascending
  int member = -1;               // this rank's index; -1 if this rank is not a member
  RecordedCall join;             // this rank's join() in flight; its `call` is 0 if there is none
  Failure join_failure;          // is sent with this rank's next join()
  std::shared_ptr<Cell> cell;    // for small calls; null if there is no cell for this set
  bool meeting = false;          // a thread of this rank is in the cell
  uint32_t under_way = 0;        // calls of this rank that the coordinator has not settled
  uint64_t ended = 0;            // number of calls that have ended; the same on all members
  uint64_t unnamed_in_cell = 0;  // unnamed calls that ended in the cell; the same on all members
  bool joined() const { return join.call != 0; }
  int members() const { return static_cast<int>(ranks.size()); }
  int member_of(Rank rank) const { return index_in(ranks, rank); }  // -1 if not a member
};

// Returns the failure of a call whose set was removed while the call was under way.
Failure gone(SetId set);

class ProcessSets {
 public:
  explicit ProcessSets(Rank own) : own_(own) {}
  void open(SetId id, std::vector<Rank> ranks);
  void close(SetId id) { sets_.erase(id); }
  ProcessSet* find(SetId id);
  // Throws Error(kInvalidArgument) if there is no such set or this rank is not a member.
  ProcessSet& own(SetId id);
  std::optional<SetId> joined_by(Handle handle) const;
  // Returns a set whose cell a thread of this rank has entered, or nullopt if there is none.
  std::optional<SetId> meeting() const;
  // Call this when the job has failed, because the coordinator then settles no more calls.
  void clear_under_way();

 private:
  Rank own_;
  std::map<SetId, ProcessSet> sets_;
};

class GpuEvent;

// One submitted tensor in flight. The first tensor of a call also represents the call.
struct Submission {
  Handle handle = 0;
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  Dimensions shape;             // shape of the input, with this rank's first dimension
  std::vector<int64_t> splits;  // see Contribution::splits
  int32_t device = kCpuDevice;
  uint64_t stream = 0;                   // CUDA stream that produces the buffers
  std::shared_ptr<GpuEvent> produced;    // recorded in `stream`
  struct NamedRequest* named = nullptr;  // found by check_free() or submit()
  uint64_t prepared = 0;  // number of the prepared call that this submission repeats; 0 if none
  int64_t value = 0;      // see Outcome::value; for a receive, the sender
  bool rider = false;     // the input is small enough for the report
  bool counted = false;   // counted in ProcessSet::under_way
  RecordedCall recorded;
  std::vector<Submission> more;  // the other tensors of a group

  Submission& part(size_t i) { return i == 0 ? *this : more[i - 1]; }
  const Submission& part(size_t i) const { return i == 0 ? *this : more[i - 1]; }
  bool holds(Handle one) const {
    return handle == one || std::ranges::count(more, one, &Submission::handle) > 0;
  }
};

// The id that was last found for a prepared unnamed call.
struct FoundId {
  uint32_t id = 0;
  uint64_t definition = 0;
};

// A name that this rank uses.
struct NamedRequest {
  NamedRequest(SetId its_set, std::string its_name) : set(its_set), name(std::move(its_name)) {}
  const SetId set;  // `set` and `name` are the record's key in the table
  const std::string name;
  bool listed = true;  // true while the record is in the table
  uint32_t id = 0;     // from the log; 0 if there is none yet or the log has dropped it
  uint64_t same = 0;   // number of a prepared call that is known to make the request of `id`
  bool in_flight = false;
  bool reported = false;  // true if the call is in flight and the log has not settled it
  Submission submission;
  // `refused` and `refused_since` count this rank's refusals that the log has not answered: those before and those
  // after the reported call. The log answers a rank's reports in order, and a refusal is one of these reports.
  int refused = 0;
  int refused_since = 0;
  bool idle() const { return !in_flight && refused == 0; }
};

// Calls indexed by number: the unnamed calls of a set, or sends and receives that are not matched yet.
struct NumberedCalls {
  uint64_t next = 0;  // number of the next call
  std::map<uint64_t, Submission> waiting;

  std::optional<Submission> take(uint64_t number) {
    auto node = waiting.extract(number);
    return node ? std::optional(std::move(node.mapped())) : std::nullopt;
  }
  std::optional<uint64_t> number_of(Handle handle) const {
    for (const auto& [number, submission] : waiting) {
      if (submission.holds(handle)) return number;
    }
    return std::nullopt;
  }
};

class PendingTable {
 public:
  // Throws Error(kInvalidArgument) if a call of this name is in flight. Must be called before submit(). `record` is the
  // cache of a prepared call. The function fills it if it is empty or its record is no longer listed.
  void check_free(const Request& request, Submission& submission,
                  std::shared_ptr<NamedRequest>& record) const;
  uint64_t next_unnamed(SetId set) { return unnamed_[set].next; }
  // Stores the submission. Adds the call's id or else its request to `ready`, which already has the contributions.
  void submit(const Request& request, Submission submission, Ready& ready);
  // Returns the number of this call's definition, which is the same on all ranks. Returns 0 if there is none, or if
  // this rank has refused a call of this name and the log has not answered yet. Must be called after check_free().
  uint64_t definition_of(const Request& request, const Submission& submission,
                         FoundId& found) const;
  // If the call has an id, stores the submission and returns the id. Otherwise stores nothing and returns 0.
  uint32_t submit_known(const Request& request, Submission& submission);
  // Stores a matched send or receive as the unnamed call `sequence` of its pair.
  void submit(SetId pair, uint64_t sequence, Submission submission) {
    unnamed_[pair].waiting.emplace(sequence, std::move(submission));
  }
  Refuse refuse(const Request& request, Failure failure);

  // Returns the key of this handle's call, or nullopt if the log has settled the call.
  std::optional<CallKey> key_of(Handle handle) const;

  // ---- For log entries
  void define(const Define& define);
  void forget(uint32_t id);
  const Request& request_of(uint32_t id) const { return known(id).request; }
  // Returns this rank's submission of a call that the log settles; nullopt if this rank has joined and has none.
  std::optional<Submission> take(uint32_t id, uint64_t sequence);
  std::optional<Submission> take(const CallKey& key);
  // Returns this rank's submission of a failed call; nullopt if there is none or if the failure answers a refusal.
  std::optional<Submission> fail(const CallKey& key);
  // Frees the name of a call that has ended.
  void finish(const Submission& submission);
  void resume(SetId set, uint64_t next_sequence);  // after a join
  // Drops all calls and names. Call this when the job has failed.
  void clear();

 private:
  struct Known {
    Request request;
    NamedRequest* named = nullptr;  // set for named requests only
    uint64_t definition = 0;
  };
  NamedRequest& named(const Request& request);
  bool stands_for(NamedRequest& record, const Request& request, uint64_t prepared) const;
  const Known& known(uint32_t id) const;
  std::optional<Submission> take(NamedRequest* record);
  void drop_unknown(const NamedRequest& record);

  std::shared_ptr<NamedRequest> find(SetId set, const std::string& name) const;  // null if unknown

  std::map<SetId, std::unordered_map<std::string, std::shared_ptr<NamedRequest>>> named_;
  std::map<SetId, NumberedCalls> unnamed_;
  std::unordered_map<std::string, uint32_t> interned_;  // ids of unnamed requests, by bytes_of()
  std::vector<std::optional<Known>> by_id_;
  uint64_t definitions_ = 0;  // number of Define entries read so far
};

// Sends a rank's reports. Calls submitted together share a report. The caller holds the mutex, unless marked otherwise.
class Reporter {
 public:
  // `gathered` is true if leaders on the path to rank 0 hold reports back for a moment.
  Reporter(MemberChannel& channel, bool gathered) : channel_(channel), gathered_(gathered) {}

  // Writes a report. Does not wake the leader.
  void pass(const Report& report);
  // Passes a Ready with this id. If all contributions are plain, only adds the id to a batch, which pass_batch() or the
  // next report sends.
  void pass_known(uint32_t id, Contribution&& given, std::vector<Contribution>&& more);
  void pass_batch();
  // Writes a report and wakes the leader.
  void send(const Report& report);
  // Makes leaders forward this rank's reports at once, until this rank's next call. Does not wake the leader. Call this
  // when a user waits.
  void expedite();
  // True if expedite() would do something. May be called from any thread.
  bool may_expedite() const { return gathered_ && !expedited_; }
  // Returns true if a report was passed since the last take_news(). The caller must then wake the leader. May be called
  // from any thread.
  bool take_news() { return news_.exchange(false); }
  // Sends reports that did not fit into the ring. Returns false if the ring is still full.
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
