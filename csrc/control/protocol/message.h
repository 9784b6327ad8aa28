// SPDX-License-Identifier: Apache-2.0
// Control messages: reports (rank to coordinator) and log entries (coordinator to all ranks).
#pragma once

#include <algorithm>
#include <string>
#include <variant>
#include <vector>

#include "base/types.h"
#include "control/protocol/codec.h"

namespace farandole {

// ---- A call, as all ranks know it. Named calls match by name, unnamed ones by their order in a set.
struct CallKey {
  SetId set = kWorldSet;
  std::string name;       // empty: unnamed
  uint64_t sequence = 0;  // unnamed calls: index in this set, from 0
  Rank poster = -1;       // >= 0: a send or receive of this rank; then sequence is Post::number
  bool posted() const { return poster >= 0; }
  bool named() const { return !name.empty(); }
};

// A call. With several tensors it is a group, which is reduced together or not at all.
struct Request {
  SetId set = kWorldSet;
  std::string name;  // empty: unnamed; then the request stands for all calls with these signatures
  Signature signature;
  std::vector<Signature> more = {};  // a group's other tensors
  bool no_tensors = false;           // an empty group, which a barrier stands for
  bool alone = false;                // see by_members()
  // ---- Sends and receives; the root is the sender. The name is only shown to users.
  Rank peer = kAnyRank;
  int64_t tag = 0;
  // Program line of an unnamed call, "train.py:12", if ranks compare lines; else empty.
  std::string site = {};

  size_t tensors() const { return no_tensors ? 0 : parts(); }
  size_t parts() const { return 1 + more.size(); }  // signatures
  const Signature& part(size_t i) const { return i == 0 ? signature : more[i - 1]; }
};
// Equal texts if and only if the requests are equal.
std::string bytes_of(const Request& request);
// True if two requests under one name are the same call.
inline bool same_terms(const Request& a, const Request& b) {
  return a.signature == b.signature && a.more == b.more && a.no_tensors == b.no_tensors &&
         a.alone == b.alone;
}
// True if a call adds or removes a set, and only the ranks in its shape take part, not the whole world. Sets added so
// may have equal members. The call's name becomes the set's, and is never used again.
inline bool by_members(const Request& request) {
  return request.signature.traits().changes_sets && request.alone;
}
// True if the call succeeds without ranks that have left: it adds or removes a set by name. (A rank that has left may
// have ended a join() early; then the others' unnamed calls are no longer numbered alike.)
inline bool spares_the_left(const Request& request) {
  return request.signature.traits().changes_sets && !request.name.empty();
}

// ---- Reports: rank to coordinator

// The part of a report that differs between ranks and calls.
struct Contribution {
  bool has_input = false;
  bool has_payload = false;     // the input is in the message: at most tiny_bytes(size of the job)
  int64_t rows = 0;             // this rank's first dimension, if CollectiveTraits::ragged()
  std::vector<int64_t> splits;  // rows for each member, if CollectiveTraits::splits()
  ByteView payload;             // points into the message
  void drop_payload() { has_payload = false, payload = {}; }
  // True for an input and nothing else, which is the same on every rank.
  bool plain() const { return has_input && !has_payload && rows == 0 && splits.empty(); }
};
// Largest input that travels in a report. The root receives those of all ranks, so large jobs have a lower limit.
constexpr size_t kTinyBytes = 4096;
constexpr size_t tiny_bytes(int ranks) {
  return std::clamp(kTinyBytes * 64 / static_cast<size_t>(ranks), size_t{1024}, kTinyBytes);
}

// This rank is ready for a call, given by id or by request.
struct Ready {
  uint32_t id = 0;  // 0: `request` holds the call
  Request request;
  uint64_t sequence = 0;  // unnamed calls
  Contribution contribution = {};
  std::vector<Contribution> more = {};  // one per Request::more

  const Contribution& part(size_t i) const { return i == 0 ? contribution : more[i - 1]; }
  Contribution& part(size_t i) { return i == 0 ? contribution : more[i - 1]; }
  bool plain() const {
    return contribution.plain() && std::ranges::all_of(more, &Contribution::plain);
  }
};
// This rank is ready for these named calls, with plain contributions. Equals a Ready for each, in order.
struct ReadyMany {
  IdRuns ids;
};
// One end of a message: a send or a receive. The coordinator matches the ends.
struct Post {
  Request request;
  uint64_t number = 0;  // each rank counts its own
  Contribution contribution;
  Failure refusal = {};  // an argument error: this rank makes no such call, and its peer's fails
};
// This rank cannot take part because of an argument error, so its peers fail, too. Counts as its report of the call. It
// reports the name again only after the call's Fail, and refuses no call in flight, and none after it has joined.
struct Refuse {
  CallKey key;
  Failure failure;
  // ---- Calls that add or remove a set; they need different ranks
  Op op = Op::kAllreduce;
  Dimensions members = {};  // if only these take part
};
struct Join {
  SetId set = kWorldSet;
  Failure failure = {};  // an argument error; all ranks raise it when all have joined
};
struct Done {  // from the set's lowest rank: its lane has finished this bucket
  SetId set = kWorldSet;
  uint64_t bucket = 0;
  bool gpu = false;  // the GPU lane numbers its buckets separately
  bool operator==(const Done&) const = default;
};
struct Forgot {  // this rank has dropped the id and will not use it in its old meaning
  uint32_t id = 0;
};
struct Leave {
  bool failed = false;
  std::string text;
};
struct StackReport {     // answer to CollectStacks: a few lines about this process
  bool stopped = false;  // the leader sends it for a stopped rank
  std::string text;
  // The main thread waits for this call without a limit, and no other thread can make calls.
  bool blocked = false;
  CallKey call = {};
  // Time since this rank's last call that the coordinator does not see; -1: none yet.
  int64_t direct_ago_ns = -1;
};
struct Inquire {  // asks whom this call waits for; the log answers with Answer
  // Each rank numbers its questions. 0: is rank 0 alive? Any log entry answers that, for all ranks.
  // Its key may have a set and the number of a bucket that stands still on this rank.
  uint64_t number = 0;
  CallKey key;
  bool join = false;  // about this set's join; then the key has no name
};
// The rank is gone. Sent by the leader of its host, or by the leader above that one.
struct Lost {
  Failure failure;
};
// Sent before a rank's first GPU tensor.
struct UseGpu {
  std::string uuid;     // the GPU's
  Rank host = 0;        // the lowest rank of its host
  std::string library;  // library for GPU collectives, with its version; empty: none works
  std::string name;
};
// Path of a set's GPU tensors: through host memory, or by a library that all members have.
enum class BackendKind : int32_t { kStaged, kLibrary };
constexpr int32_t kBackendKindCount = 2;
// Opens a set's backend on all members, before the set's first GPU bucket. For a library, the lowest member reports
// the key by which the members connect, and the coordinator logs it.
struct SetUp {
  SetId set = kWorldSet;
  std::string key = {};  // empty: open the set's backend
  // ---- Without a key
  BackendKind backend = BackendKind::kLibrary;
  std::vector<Rank> ranks = {};  // members of the set
};
// This rank's user waits: leaders forward its reports at once until its next Ready. The coordinator ignores it.
struct Expedite {};
using Report = std::variant<Ready, Refuse, Join, Done, Forgot, Leave, StackReport, Inquire,
                            ReadyMany, Lost, UseGpu, SetUp, Expedite, Post>;

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
struct PartInputs {                  // inputs of one tensor
  std::vector<int32_t> absent = {};  // member indices without input
  std::vector<int64_t> rows = {};    // Part::rows
  bool plain() const { return absent.empty() && rows.empty(); }
};
struct Item {  // one call in a bucket
  uint32_t id = 0;
  uint64_t sequence = 0;  // unnamed calls
  PartInputs inputs = {};
  std::vector<PartInputs> more = {};  // one per Request::more; empty: all are plain

  const PartInputs& part(size_t i) const {
    static const PartInputs plain;
    if (i == 0) return inputs;
    return more.empty() ? plain : more[i - 1];
  }
};
struct Run {  // the set's lane moves these calls
  SetId set = kWorldSet;
  uint64_t bucket = 0;
  std::vector<Item> items;
  IdRuns plain = {};  // follow the items: Items with an id only
  bool gpu = false;   // on the GPU lane
};
struct Result {  // completes a call at once, with a result or as absent
  SetId set = kWorldSet;
  uint32_t id = 0;
  uint64_t sequence = 0;
  bool absent = false;
  // A group's tensors follow each other.
  std::vector<int64_t> rows;  // allgather
  ByteString payload;
};
struct Fail {
  CallKey key;
  Failure failure;
  // Ranks that had not reported the call. If they report it later, they mean the next one.
  std::vector<Rank> unheard = {};
};
struct Joined {
  SetId set = kWorldSet;
  Rank last = 0;
  uint64_t next_sequence = 0;  // next unnamed call of this set
  Failure failure = {};        // from a Join
};
struct OpenSet {
  SetId set = 0;
  std::vector<Rank> ranks;
  CallKey key;  // the call that requested it; of a pair: none
};
// A send and a receive have met: on their ranks they become the next unnamed call of the pair, and run like any other.
struct Matched {
  SetId pair = 0;
  uint64_t sequence = 0;  // there
  Rank sender = 0;
  uint64_t sent = 0;  // Post::number
  Rank receiver = 0;
  uint64_t received = 0;
};
struct CloseSet {
  SetId set = 0;
  CallKey key;
};
struct Abort {  // the job has failed: all calls fail with this, now and later
  Failure failure;
};
struct Stop {};         // all ranks have left
struct CollectStacks {  // others wait for these ranks, which answer with a StackReport
  std::vector<Rank> ranks;
};
struct Answer {  // the answer to one rank's Inquire
  Rank to = -1;  // -1: only a sign of life
  uint64_t number = 0;
  std::string text;
};
struct
    Notice {  // for the users of this set's ranks: something looks wrong, though nothing has failed
  SetId set = kWorldSet;
  std::string text;
};
using Entry = std::variant<Define, Forget, Run, Result, Fail, Joined, OpenSet, CloseSet, Abort,
                           Stop, CollectStacks, Answer, SetUp, Matched, Notice>;

void encode(const Report& report, ByteString& out);
void encode(const Entry& entry, ByteString& out);
// Throw Error(kInternal) on bytes that encode() does not produce. A Ready's payload points into `in`.
Report decode_report(ByteView in);
Entry decode_entry(ByteView in);

}  // namespace farandole
