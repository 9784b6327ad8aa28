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
  uint64_t sequence = 0;  // of unnamed calls of this set, from 0
  Rank poster = -1;       // >= 0: a send or receive of this rank; the sequence is Post::number
  bool posted() const { return poster >= 0; }
  bool named() const { return !name.empty(); }
};

// A call of several tensors is a group: they are reduced together, all or none.
struct Request {
  SetId set = kWorldSet;
  std::string name;  // empty: unnamed; then it stands for all with these signatures
  Signature signature;
  std::vector<Signature> more = {};  // of a group: those of its other tensors
  bool no_tensors = false;           // a group without any, for which a barrier stands
  bool alone = false;                // see by_members()
  // ---- of a send or receive, whose root is the sender. Its name is for people.
  Rank peer = kAnyRank;
  int64_t tag = 0;
  // Where the program makes an unnamed call, "train.py:12", if ranks compare that; else empty.
  std::string site = {};

  size_t tensors() const { return no_tensors ? 0 : parts(); }
  size_t parts() const { return 1 + more.size(); }  // signatures
  const Signature& part(size_t i) const { return i == 0 ? signature : more[i - 1]; }
};
// The same text for equal requests only.
std::string bytes_of(const Request& request);
// Whether two requests under one name are the same call.
inline bool same_terms(const Request& a, const Request& b) {
  return a.signature == b.signature && a.more == b.more && a.no_tensors == b.no_tensors &&
         a.alone == b.alone;
}
// True if only the ranks in its shape take part in a call that adds or removes a set, not the whole world. Sets
// added so may be alike; the call's name is the set's, and never used again.
inline bool by_members(const Request& request) {
  return request.signature.traits().changes_sets && request.alone;
}
// True if the call needs no ranks that have left: it adds or removes a set, by name. (Who has left may have ended a
// join() early, after which the others' unnamed calls are no longer numbered alike.)
inline bool spares_the_left(const Request& request) {
  return request.signature.traits().changes_sets && !request.name.empty();
}

// ---- Reports: rank to coordinator

// The part of a report that differs between ranks and calls.
struct Contribution {
  bool has_input = false;
  bool has_payload = false;     // the input is in the message (at most kTinyBytes)
  int64_t rows = 0;             // if CollectiveTraits::ragged(): this rank's first dimension
  std::vector<int64_t> splits;  // if CollectiveTraits::splits(): rows for each member
  ByteView payload;             // points into the message
  void drop_payload() { has_payload = false, payload = {}; }
  // An input and nothing else: the same from every rank.
  bool plain() const { return has_input && !has_payload && rows == 0 && splits.empty(); }
};
constexpr size_t kTinyBytes = 1024;

// This rank is ready for a call, given by either id or request.
struct Ready {
  uint32_t id = 0;  // 0: `request` is sent
  Request request;
  uint64_t sequence = 0;  // unnamed calls
  Contribution contribution = {};
  std::vector<Contribution> more = {};  // as Request::more

  const Contribution& part(size_t i) const { return i == 0 ? contribution : more[i - 1]; }
  Contribution& part(size_t i) { return i == 0 ? contribution : more[i - 1]; }
  bool plain() const {
    return contribution.plain() && std::ranges::all_of(more, &Contribution::plain);
  }
};
// This rank is ready for these named calls, with plain contributions: the same as a Ready for each, in order.
struct ReadyMany {
  IdRuns ids;
};
// One end of a message: a send or a receive. The coordinator matches the two.
struct Post {
  Request request;
  uint64_t number = 0;  // each rank counts its own
  Contribution contribution;
  Failure refusal = {};  // an argument error: this rank has no such call, but its peer's fails
};
// This rank can't take part (an argument error), so its peers fail, too. It counts as the rank's report of
// the call. The rank reports the name again only after the call's Fail (a retry waits for it), and refuses
// nothing that it has in flight or after it has joined.
struct Refuse {
  CallKey key;
  Failure failure;
  // ---- of a call that adds or removes a set, because it needs other ranks than other calls
  Op op = Op::kAllreduce;
  Dimensions members = {};  // if only these make it
};
struct Join {
  SetId set = kWorldSet;
  Failure failure = {};  // an argument error: all raise it once all have joined
};
struct Done {  // from the set's lowest rank: its lane has finished this bucket
  SetId set = kWorldSet;
  uint64_t bucket = 0;
  bool gpu = false;  // of the GPU lane, which numbers its buckets separately
};
struct Forgot {  // the rank has dropped this id and will not use it again in its old meaning
  uint32_t id = 0;
};
struct Leave {
  bool failed = false;
  std::string text;
};
struct StackReport {     // answer to CollectStacks: what this process is doing, in a few lines
  bool stopped = false;  // sent by the leader for a rank that is stopped
  std::string text;
  // The main thread waits for this call, without a limit of its own, and no other thread can make calls.
  bool blocked = false;
  CallKey call = {};
  // Since its last call that the coordinator does not know; -1: it has made none.
  int64_t direct_ago_ns = -1;
};
struct Inquire {  // asks whom this call waits for; the log answers with Answer
  // The question's number; each rank counts its own. 0: asks whether rank 0 is alive, which any entry of the log
  // answers, to all ranks at once.
  uint64_t number = 0;
  CallKey key;
  bool join = false;  // about this set's join; the key then has no name
};
// Sent by the leader of the rank's host, or the leader above: the rank is gone.
struct Lost {
  Failure failure;
};
// Sent before a rank's first GPU tensor.
struct UseGpu {
  std::string uuid;     // of the GPU
  Rank host = 0;        // the lowest rank of its host
  std::string library;  // of GPU collectives, with its version; empty: it has none that works
  std::string name;
};
// How a set's tensors on GPUs travel: through host memory, or by the library that all its members have.
enum class BackendKind : int32_t { kStaged, kLibrary };
constexpr int32_t kBackendKindCount = 2;
// Opens a set's backend on all its members, before the set's first GPU bucket. If the backend is a library, its lowest
// member reports the key by which the members connect, and the coordinator writes it to the log.
struct SetUp {
  SetId set = kWorldSet;
  std::string key = {};  // empty: the set's backend is to be opened
  // ---- without a key
  BackendKind backend = BackendKind::kLibrary;
  std::vector<Rank> ranks = {};  // of the set
};
// The rank's user waits: leaders forward its reports at once, until the rank's next Ready. Consumed by
// leaders; the coordinator ignores it.
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
struct PartInputs {                  // of one tensor
  std::vector<int32_t> absent = {};  // member indices without input
  std::vector<int64_t> rows = {};    // as Part::rows
  bool plain() const { return absent.empty() && rows.empty(); }
};
struct Item {  // one call in a bucket
  uint32_t id = 0;
  uint64_t sequence = 0;  // unnamed calls
  PartInputs inputs = {};
  std::vector<PartInputs> more = {};  // as Request::more; empty: all are plain

  const PartInputs& part(size_t i) const {
    static const PartInputs plain;
    if (i == 0) return inputs;
    return more.empty() ? plain : more[i - 1];
  }
};
struct Run {  // the set's lane moves these bytes
  SetId set = kWorldSet;
  uint64_t bucket = 0;
  std::vector<Item> items;
  IdRuns plain = {};  // after the items: each is an Item of which only the id is set
  bool gpu = false;   // on the GPU lane
};
struct Result {  // complete at once: holds the result, or no member had a buffer
  SetId set = kWorldSet;
  uint32_t id = 0;
  uint64_t sequence = 0;
  bool absent = false;
  // Those of a group's tensors follow each other.
  std::vector<int64_t> rows;  // allgather
  ByteString payload;
};
struct Fail {
  CallKey key;
  Failure failure;
  // Ranks that had not reported the call: a report that they send meanwhile is about a new one.
  std::vector<Rank> unheard = {};
};
struct Joined {
  SetId set = kWorldSet;
  Rank last = 0;
  uint64_t next_sequence = 0;  // of unnamed calls of this set, from now on
  Failure failure = {};        // from a Join
};
struct OpenSet {
  SetId set = 0;
  std::vector<Rank> ranks;
  CallKey key;  // the call that requested it; of a pair: none
};
// A send and a receive have met. On these ranks they become the next unnamed call of their pair, which is
// then run or completed like any other.
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
