// SPDX-License-Identifier: Apache-2.0
// Control messages: reports (from a rank to the coordinator) and log entries (from the coordinator to all ranks).
#pragma once

#include <algorithm>
#include <string>
#include <variant>
#include <vector>

#include "base/types.h"
#include "control/protocol/codec.h"

namespace farandole {

// Identifies a call on all ranks. Named calls match by their names, and unnamed calls match by their order in a set.
struct CallKey {
  SetId set = kWorldSet;
  std::string name;       // empty for an unnamed call
  uint64_t sequence = 0;  // for an unnamed call, its index in this set, from 0
  // If this is not -1, the rank that posted this send or receive. `sequence` is then its Post::number.
  Rank poster = -1;
  bool posted() const { return poster >= 0; }
  bool named() const { return !name.empty(); }
};

// The terms of a call. A group is a call of several tensors, which are reduced together or not at all.
struct Request {
  SetId set = kWorldSet;
  std::string name;  // empty for an unnamed call; unnamed calls with equal requests share an id
  Signature signature;
  std::vector<Signature> more = {};  // the other tensors of a group
  bool no_tensors = false;           // an empty group, whose signature is that of a barrier
  bool alone = false;                // see by_members()
  // For a send or receive, the other end's rank, or kAnyRank for any sender. The signature's root is the sender.
  Rank peer = kAnyRank;
  int64_t tag = 0;
  // Line of an unnamed call in the program, such as "train.py:12", if ranks compare lines. Otherwise empty.
  std::string site = {};

  size_t tensors() const { return no_tensors ? 0 : parts(); }
  size_t parts() const { return 1 + more.size(); }  // number of signatures
  const Signature& part(size_t i) const { return i == 0 ? signature : more[i - 1]; }
};
// Returns a text that is the same for two requests if and only if the requests are equal.
std::string bytes_of(const Request& request);
// True if two requests of the same name have equal terms, so that they form one call.
inline bool same_terms(const Request& a, const Request& b) {
  return a.signature == b.signature && a.more == b.more && a.no_tensors == b.no_tensors &&
         a.alone == b.alone;
}
// True if a call adds or removes a set and is made only by the ranks that its signature's shape lists, instead of the
// whole world. Two sets that were added in this way may have the same members. Such a set has the name of the call,
// which nobody may use again.
inline bool by_members(const Request& request) {
  return request.signature.traits().changes_sets && request.alone;
}
// True if the call succeeds without ranks that have left: it adds or removes a set, and it has a name. Unnamed calls
// fail instead: joins end early when a rank leaves, so ranks may no longer agree on the numbers of their unnamed calls.
inline bool spares_the_left(const Request& request) {
  return request.signature.traits().changes_sets && !request.name.empty();
}

// ---- Reports, which a rank sends to the coordinator

// The part of a report that may differ between ranks, and between calls that have the same id.
struct Contribution {
  bool has_input = false;
  bool has_payload = false;     // the input is in the message: at most tiny_bytes(job size)
  int64_t rows = 0;             // first dimension of the input, if CollectiveTraits::ragged()
  std::vector<int64_t> splits;  // number of rows for each member, if CollectiveTraits::splits()
  ByteView payload;             // points into the message
  void drop_payload() { has_payload = false, payload = {}; }
  // True if the contribution says only that there is an input. All plain contributions are equal.
  bool plain() const { return has_input && !has_payload && rows == 0 && splits.empty(); }
};
// The largest input that travels in a report. Large jobs have a lower limit, because rank 0 receives all inputs.
constexpr size_t kTinyBytes = 4096;
constexpr size_t tiny_bytes(int ranks) {
  return std::clamp(kTinyBytes * 64 / static_cast<size_t>(ranks), size_t{1024}, kTinyBytes);
}

// This rank is ready for a call, which is identified by an id or by a request.
struct Ready {
  uint32_t id = 0;  // 0 if `request` describes the call
  Request request;
  uint64_t sequence = 0;  // number of an unnamed call
  Contribution contribution = {};
  std::vector<Contribution> more = {};  // one for each element of Request::more

  const Contribution& part(size_t i) const { return i == 0 ? contribution : more[i - 1]; }
  Contribution& part(size_t i) { return i == 0 ? contribution : more[i - 1]; }
  bool plain() const {
    return contribution.plain() && std::ranges::all_of(more, &Contribution::plain);
  }
};
// This rank is ready for these named calls, with plain contributions. Equivalent to one Ready for each, in order.
struct ReadyMany {
  IdRuns ids;
};
// This rank has started a send or a receive. The coordinator matches the two ends of a message.
struct Post {
  Request request;
  uint64_t number = 0;  // counts this rank's posts
  Contribution contribution;
  Failure refusal = {};  // an argument error, so this rank makes no call and the peer's call fails
};
// This rank cannot take part in a call because of an argument error, so the calls of its peers fail, too. A Refuse
// counts as the rank's report of the call. If the rank reports the name again before the call's Fail, that report
// means the next call, and so does a refusal of a name that it has in flight. A rank refuses no call after it has joined.
struct Refuse {
  CallKey key;
  Failure failure;
  // For calls that add or remove a set, these two fields tell which ranks take part.
  Op op = Op::kAllreduce;
  Dimensions members = {};  // the ranks that take part, if the call is by_members()
};
struct Join {
  SetId set = kWorldSet;
  Failure failure = {};  // an argument error, which all ranks raise when all of them have joined
};
struct Done {  // the lane of the set's lowest rank has finished this bucket
  SetId set = kWorldSet;
  uint64_t bucket = 0;
  bool gpu = false;  // the buckets of the GPU lane have their own numbers
  bool operator==(const Done&) const = default;
};
struct Forgot {  // this rank has read Forget, and no longer uses the id for the old request
  uint32_t id = 0;
};
struct Leave {
  bool failed = false;  // may follow a Leave that did not fail
  std::string text;     // why the rank has failed
  bool waited = false;  // the rank has failed because the others have not left in time
};
struct StackReport {     // answers CollectStacks with a few lines about this process
  bool stopped = false;  // the process is stopped, so its leader answers on its behalf
  std::string text;
  // True if the main thread waits for `call` without a limit, and no other thread can make calls.
  bool blocked = false;
  CallKey call = {};
  // Time since this rank's last call in a cell, which the coordinator does not see. It is -1 if there was none yet.
  int64_t direct_ago_ns = -1;
};
struct Inquire {  // asks for which ranks this call waits; the log answers with an Answer
  // Each rank numbers its questions. 0 only asks if rank 0 is alive; any log entry answers that, for all ranks.
  uint64_t number = 0;
  CallKey key;
  bool join = false;  // asks about the set's join; the key then has no name
};
// The oldest bucket that has started on this rank and has not ended. A rank repeats this report while its user waits.
struct Stuck {
  SetId set = kWorldSet;  // the set may have been removed since
  uint64_t bucket = 0;
  bool gpu = false;
  int64_t age_ns = 0;
  std::vector<Rank> ranks = {};  // members of the set, ascending; empty for the world
};
// The rank has died, or can no longer take part in the job. This report is sent by the leader of the rank's host, or by
// the leader above that leader.
struct Lost {
  Failure failure;
};
// Describes the GPU of this rank. The rank sends this report before its first GPU tensor.
struct UseGpu {
  std::string uuid;
  Rank host = 0;        // the lowest rank on the GPU's host
  std::string library;  // name and version of the library for GPU collectives, or ""
  std::string name;
};
// The path of a set's GPU tensors: through host memory, or through a GPU library that all members have.
enum class BackendKind : int32_t { kStaged, kLibrary };
constexpr int32_t kBackendKindCount = 2;
// Opens the backend of a set on all members, before the set's first GPU bucket. For a library, the lowest member
// reports the key with which the members connect, and the coordinator writes it to the log.
struct OpenGpu {
  SetId set = kWorldSet;
  std::string key = {};  // empty in the entry that opens the set's backend
  // ---- The fields below are used if there is no key
  BackendKind backend = BackendKind::kLibrary;
  std::vector<Rank> ranks = {};  // members of the set
};
// For leaders only. This rank's user waits, so leaders forward this rank's reports at once, until its next Ready.
struct Expedite {};
using Report = std::variant<Ready, Refuse, Join, Done, Forgot, Leave, StackReport, Inquire,
                            ReadyMany, Lost, UseGpu, OpenGpu, Expedite, Post, Stuck>;

inline bool says_ready(const Report& report) {
  return std::holds_alternative<Ready>(report) || std::holds_alternative<ReadyMany>(report);
}

// ---- Log entries, which the coordinator sends to all ranks in one total order

struct Define {
  uint32_t id = 0;
  Request request;
};
struct Forget {
  uint32_t id = 0;
};
struct PartInputs {                  // the inputs of one tensor
  std::vector<int32_t> absent = {};  // members without an input
  std::vector<int64_t> rows = {};    // Part::rows
  bool plain() const { return absent.empty() && rows.empty(); }
};
struct Item {  // a call in a bucket
  uint32_t id = 0;
  uint64_t sequence = 0;  // number of an unnamed call
  PartInputs inputs = {};
  std::vector<PartInputs> more = {};  // one per Request::more; empty if all are plain

  const PartInputs& part(size_t i) const {
    static const PartInputs plain;
    if (i == 0) return inputs;
    return more.empty() ? plain : more[i - 1];
  }
};
struct Run {  // a bucket: the lane of the set moves these calls
  SetId set = kWorldSet;
  uint64_t bucket = 0;
  std::vector<Item> items;
  IdRuns plain = {};  // calls that need only an id; they follow the items
  bool gpu = false;   // true if the GPU lane moves them
};
struct Result {  // completes a call without a bucket; it has a result or is absent
  SetId set = kWorldSet;
  uint32_t id = 0;
  uint64_t sequence = 0;
  bool absent = false;
  // For a group, these fields hold the values of all tensors, one tensor after the other.
  std::vector<int64_t> rows;  // for allgather
  ByteString payload;
};
struct Fail {
  CallKey key;
  Failure failure;
  // Ranks that had not reported the call. If one of these ranks reports it later, the report means the next call.
  std::vector<Rank> unheard = {};
};
struct Joined {
  SetId set = kWorldSet;
  Rank last = 0;
  uint64_t next_sequence = 0;  // number of the set's next unnamed call
  Failure failure = {};        // from a Join
};
struct OpenSet {
  SetId set = 0;
  std::vector<Rank> ranks;
  CallKey key;  // the call that requested the set; empty for a pair
};
// A send and a receive match. On their two ranks, they become the next unnamed call of the pair.
struct Matched {
  SetId pair = 0;
  uint64_t sequence = 0;  // number of that unnamed call
  Rank sender = 0;
  uint64_t sent = 0;  // Post::number of the send
  Rank receiver = 0;
  uint64_t received = 0;
};
struct CloseSet {
  SetId set = 0;
  CallKey key;
};
struct Abort {  // the job has failed, so all calls fail with this failure, now and later
  Failure failure;
};
struct Stop {};         // all ranks have left
struct CollectStacks {  // other ranks wait for these ranks, which must answer with a StackReport
  std::vector<Rank> ranks;
};
struct Answer {  // the answer to an Inquire of one rank
  Rank to = -1;  // -1 if the entry is only a sign of life
  uint64_t number = 0;
  std::string text;
};
struct Notice {  // tells users of this set's ranks that something looks wrong but has not failed
  SetId set = kWorldSet;
  std::string text;
};
using Entry = std::variant<Define, Forget, Run, Result, Fail, Joined, OpenSet, CloseSet, Abort,
                           Stop, CollectStacks, Answer, OpenGpu, Matched, Notice>;

void encode(const Report& report, ByteString& out);
void encode(const Entry& entry, ByteString& out);
// Both throw Error(kInternal) if encode() cannot have made these bytes. The payload of a Ready points into `in`.
Report decode_report(ByteView in);
Entry decode_entry(ByteView in);

}  // namespace farandole
