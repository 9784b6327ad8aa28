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

// Identifies a call on all ranks. Named calls match by name, unnamed calls by their order in a set.
struct CallKey {
  SetId set = kWorldSet;
  std::string name;       // empty: unnamed
  uint64_t sequence = 0;  // unnamed calls: index in this set, from 0
  // If not -1, the rank that posted this send or receive. `sequence` is then its Post::number.
  Rank poster = -1;
  bool posted() const { return poster >= 0; }
  bool named() const { return !name.empty(); }
};

// The terms of a call. A group is a call of several tensors, which are reduced together or not at all.
struct Request {
  SetId set = kWorldSet;
  std::string name;  // empty: unnamed; unnamed calls with equal requests share one id
  Signature signature;
  std::vector<Signature> more = {};  // a group's other tensors
  bool no_tensors = false;           // an empty group; its signature is a barrier's
  bool alone = false;                // see by_members()
  // Sends and receives: the other end (kAnyRank: any sender). The signature's root is the sender.
  Rank peer = kAnyRank;
  int64_t tag = 0;
  // Program line of an unnamed call, "train.py:12", if ranks compare lines; else empty.
  std::string site = {};

  size_t tensors() const { return no_tensors ? 0 : parts(); }
  size_t parts() const { return 1 + more.size(); }  // signatures
  const Signature& part(size_t i) const { return i == 0 ? signature : more[i - 1]; }
};
// Returns a text that is equal for equal requests only.
std::string bytes_of(const Request& request);
// True if two requests with equal names have equal terms, so that they form one call.
inline bool same_terms(const Request& a, const Request& b) {
  return a.signature == b.signature && a.more == b.more && a.no_tensors == b.no_tensors &&
         a.alone == b.alone;
}
// True if a call adds or removes a set, and is made only by the ranks that its signature's shape lists, not by the
// whole world. Two sets that were added in this way may have equal members. Such a set has the call's name, which
// nobody may use again.
inline bool by_members(const Request& request) {
  return request.signature.traits().changes_sets && request.alone;
}
// True if the call succeeds without ranks that have left: it adds or removes a set, and has a name. (Unnamed calls
// fail: when a rank leaves, joins end early, so ranks may no longer agree on the numbers of their unnamed calls.)
inline bool spares_the_left(const Request& request) {
  return request.signature.traits().changes_sets && !request.name.empty();
}

// ---- Reports: rank to coordinator

// The part of a report that may differ between ranks and between calls of one id.
struct Contribution {
  bool has_input = false;
  bool has_payload = false;     // the input is in the message: at most tiny_bytes(size of the job)
  int64_t rows = 0;             // the input's first dimension, if CollectiveTraits::ragged()
  std::vector<int64_t> splits;  // rows for each member, if CollectiveTraits::splits()
  ByteView payload;             // points into the message
  void drop_payload() { has_payload = false, payload = {}; }
  // True if the only information is that there is an input. All plain contributions are equal.
  bool plain() const { return has_input && !has_payload && rows == 0 && splits.empty(); }
};
// Largest input that travels in a report. Rank 0 receives the inputs of all ranks, so large jobs have a lower limit.
constexpr size_t kTinyBytes = 4096;
constexpr size_t tiny_bytes(int ranks) {
  return std::clamp(kTinyBytes * 64 / static_cast<size_t>(ranks), size_t{1024}, kTinyBytes);
}

// This rank is ready for a call, which an id or a request identifies.
struct Ready {
  uint32_t id = 0;  // 0: `request` holds the call
  Request request;
  uint64_t sequence = 0;  // of an unnamed call
  Contribution contribution = {};
  std::vector<Contribution> more = {};  // one per Request::more

  const Contribution& part(size_t i) const { return i == 0 ? contribution : more[i - 1]; }
  Contribution& part(size_t i) { return i == 0 ? contribution : more[i - 1]; }
  bool plain() const {
    return contribution.plain() && std::ranges::all_of(more, &Contribution::plain);
  }
};
// This rank is ready for these named calls, with plain contributions. Equivalent to a Ready for each, in order.
struct ReadyMany {
  IdRuns ids;
};
// This rank has started a send or a receive. The coordinator matches both ends of a message.
struct Post {
  Request request;
  uint64_t number = 0;  // counts this rank's posts
  Contribution contribution;
  Failure refusal = {};  // an argument error: this rank makes no call, and the peer's call fails
};
// This rank cannot take part in a call because of an argument error, so its peers' calls fail, too. A Refuse counts
// as the rank's report of the call. The rank reports the name again only after the call's Fail. A rank never refuses a
// call that it has in flight, nor any call after it has joined.
struct Refuse {
  CallKey key;
  Failure failure;
  // For calls that add or remove a set: these two fields tell which ranks take part.
  Op op = Op::kAllreduce;
  Dimensions members = {};  // the ranks that take part, if by_members()
};
struct Join {
  SetId set = kWorldSet;
  Failure failure = {};  // an argument error; when all ranks have joined, all raise it
};
struct Done {  // the lane of the set's lowest rank has finished this bucket
  SetId set = kWorldSet;
  uint64_t bucket = 0;
  bool gpu = false;  // buckets of the GPU lane have their own numbers
  bool operator==(const Done&) const = default;
};
struct Forgot {  // this rank has read Forget, and no longer uses the id for the old request
  uint32_t id = 0;
};
struct Leave {
  bool failed = false;  // may follow a Leave that did not fail
  std::string text;     // why it has failed
  bool waited = false;  // the rank failed because the others have not left in time
};
struct StackReport {     // answers CollectStacks with a few lines about this process
  bool stopped = false;  // the process is stopped, and its leader answers for it
  std::string text;
  // True: the main thread waits for `call` without a limit, and no other thread can make calls.
  bool blocked = false;
  CallKey call = {};
  // Time since this rank's last call in a cell, which the coordinator does not see; -1: none yet.
  int64_t direct_ago_ns = -1;
};
struct Inquire {  // asks for which ranks this call waits; the log answers with Answer
  // Each rank numbers its questions. 0 asks if rank 0 is alive; any log entry is the answer, for all ranks.
  uint64_t number = 0;
  CallKey key;
  bool join = false;  // about this set's join; then the key has no name
};
// The oldest bucket that has started on this rank and not ended. A rank repeats this while its user waits.
struct Stuck {
  SetId set = kWorldSet;  // may have been removed since
  uint64_t bucket = 0;
  bool gpu = false;
  int64_t age_ns = 0;
  std::vector<Rank> ranks = {};  // members of the set, ascending; empty for the world
};
// The rank is gone. Sent by the leader of the rank's host, or by the leader above that leader.
struct Lost {
  Failure failure;
};
// Describes this rank's GPU. The rank sends it before its first GPU tensor.
struct UseGpu {
  std::string uuid;
  Rank host = 0;        // the lowest rank of the GPU's host
  std::string library;  // name and version of the library for GPU collectives; empty: there is none
  std::string name;
};
// Path of a set's GPU tensors: through host memory, or by a GPU library that all members have.
enum class BackendKind : int32_t { kStaged, kLibrary };
constexpr int32_t kBackendKindCount = 2;
// Opens a set's backend on all members, before the set's first GPU bucket. For a library, the lowest member reports
// the key with which the members connect, and the coordinator logs it.
struct OpenGpu {
  SetId set = kWorldSet;
  std::string key = {};  // empty: open the set's backend
  // ---- Without a key
  BackendKind backend = BackendKind::kLibrary;
  std::vector<Rank> ranks = {};  // members of the set
};
// The user of this rank waits, so leaders forward this rank's reports at once, until its next Ready. For leaders only.
struct Expedite {};
using Report = std::variant<Ready, Refuse, Join, Done, Forgot, Leave, StackReport, Inquire,
                            ReadyMany, Lost, UseGpu, OpenGpu, Expedite, Post, Stuck>;

inline bool says_ready(const Report& report) {
  return std::holds_alternative<Ready>(report) || std::holds_alternative<ReadyMany>(report);
}

// ---- Log entries: coordinator to all ranks, in one total order

struct Define {
  uint32_t id = 0;
  Request request;
};
struct Forget {
  uint32_t id = 0;
};
struct PartInputs {                  // the inputs of one tensor
  std::vector<int32_t> absent = {};  // members without input
  std::vector<int64_t> rows = {};    // Part::rows
  bool plain() const { return absent.empty() && rows.empty(); }
};
struct Item {  // a call in a bucket
  uint32_t id = 0;
  uint64_t sequence = 0;  // of an unnamed call
  PartInputs inputs = {};
  std::vector<PartInputs> more = {};  // one per Request::more; empty: all are plain

  const PartInputs& part(size_t i) const {
    static const PartInputs plain;
    if (i == 0) return inputs;
    return more.empty() ? plain : more[i - 1];
  }
};
struct Run {  // a bucket: the set's lane moves these calls
  SetId set = kWorldSet;
  uint64_t bucket = 0;
  std::vector<Item> items;
  IdRuns plain = {};  // further calls, after the items, that need only an id
  bool gpu = false;   // the GPU lane moves them
};
struct Result {  // completes a call without a bucket, with a result or as absent
  SetId set = kWorldSet;
  uint32_t id = 0;
  uint64_t sequence = 0;
  bool absent = false;
  // For a group, the values of all tensors in turn:
  std::vector<int64_t> rows;  // for allgather
  ByteString payload;
};
struct Fail {
  CallKey key;
  Failure failure;
  // Ranks that had not reported the call. A later report of one of these ranks means the next call.
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
// A send and a receive match: on their ranks they become the next unnamed call of the pair.
struct Matched {
  SetId pair = 0;
  uint64_t sequence = 0;  // number of that call
  Rank sender = 0;
  uint64_t sent = 0;  // Post::number
  Rank receiver = 0;
  uint64_t received = 0;
};
struct CloseSet {
  SetId set = 0;
  CallKey key;
};
struct Abort {  // the job has failed: all calls fail with this failure, now and later
  Failure failure;
};
struct Stop {};         // all ranks have left
struct CollectStacks {  // others wait for these ranks, which must answer with a StackReport
  std::vector<Rank> ranks;
};
struct Answer {  // the answer to one rank's Inquire
  Rank to = -1;  // -1: only a sign of life
  uint64_t number = 0;
  std::string text;
};
struct Notice {  // for users of this set's ranks: something looks wrong but has not failed
  SetId set = kWorldSet;
  std::string text;
};
using Entry = std::variant<Define, Forget, Run, Result, Fail, Joined, OpenSet, CloseSet, Abort,
                           Stop, CollectStacks, Answer, OpenGpu, Matched, Notice>;

void encode(const Report& report, ByteString& out);
void encode(const Entry& entry, ByteString& out);
// Throw Error(kInternal) if encode() cannot have made these bytes. The payload of a Ready points into `in`.
Report decode_report(ByteView in);
Entry decode_entry(ByteView in);

}  // namespace farandole
