// SPDX-License-Identifier: Apache-2.0
// What a rank tells the coordinator (reports) and what the coordinator tells all ranks (log entries).
#pragma once

#include <string>
#include <variant>
#include <vector>

#include "base/types.h"
#include "control/protocol/codec.h"

namespace farandole {

// ---- A call, as all ranks know it. Named calls meet by name, unnamed ones by their order in a set.
//
// A group is known by its first call: whatever its size, that goes by the name of the group, or, unnamed, by
// its place in the order. So ranks that disagree about the size, or bring nothing, meet there. The others
// follow: of an unnamed group under the same number, with their places in the group above it.
constexpr int kFollowerShift = 40;
struct CallKey {
  SetId set = kWorldSet;
  std::string name;       // empty: unnamed
  uint64_t sequence = 0;  // of unnamed calls in this set, from 0
  bool named() const { return !name.empty(); }
  uint64_t number() const { return sequence & ((uint64_t{1} << kFollowerShift) - 1); }
  uint64_t place() const { return sequence >> kFollowerShift; }  // in its unnamed group
};

struct Request {
  SetId set = kWorldSet;
  std::string name;   // empty: unnamed; then the request is an interned signature
  std::string group;  // empty: alone
  Signature signature;
};
// Whether two requests under one name are the same call.
inline bool same_terms(const Request& a, const Request& b) {
  return a.signature == b.signature && a.group == b.group;
}
// Of a group in which it is not the first. `place`: that of an unnamed one, by its key.
inline bool follows(const Request& request, uint64_t place) {
  if (request.group.empty()) return false;
  return request.name.empty() ? place > 0 : request.name != request.group;
}

// ---- Reports: rank -> coordinator

// What differs from rank to rank and from call to call.
struct Contribution {
  bool has_input = false;
  bool has_payload = false;     // the input itself rides along (at most kTinyBytes)
  int64_t rows = 0;             // where CollectiveTraits::ragged(): this rank's first dimension
  std::vector<int64_t> splits;  // where CollectiveTraits::splits(): rows for each member
  ByteView payload;             // points into the message
};
constexpr size_t kTinyBytes = 1024;

// "I am ready for this." Exactly one of id and request says what for.
struct Ready {
  uint32_t id = 0;  // 0: the request travels
  Request request;
  uint64_t sequence = 0;  // unnamed calls
  Contribution contribution;
};
// "I can't take part": an argument error found on one rank fails its peers too. It is this rank's report
// of that call: the rank reports the same name again only after the call's Fail (a retry waits for it),
// and refuses nothing that it has in flight or while it has joined.
struct Refuse {
  CallKey key;
  Failure failure;
};
struct Join {
  SetId set = kWorldSet;
  Failure failure = {};  // what was wrong with the call: all raise it once all have joined
};
struct Done {  // by the set's lowest rank: its lane has finished this bucket
  SetId set = kWorldSet;
  uint64_t bucket = 0;
  bool gpu = false;  // of the lane of GPUs, which counts for itself
};
struct Forgot {  // the rank has dropped this id: nothing it sends later means it
  uint32_t id = 0;
};
struct Leave {
  bool failed = false;
  std::string text;
};
struct Whereabouts {     // the answer to WhereAre: what this process does now, in a few lines
  bool stopped = false;  // said by the leader of a rank that stands still, and can't say it itself
  std::string text;
};
struct Inquire {        // "Whom does this call wait for?" Answered by Inform.
  uint64_t number = 0;  // of the question, among this rank's
  CallKey key;
  bool join = false;  // about this set's join; the key has no name then
};
// Stands for a Ready, with input and nothing else, of every call in the bundle.
struct ReadyAll {
  uint32_t bundle = 0;
};
// The rank's last word about a bundle: it is ready for these positions of it, as in ReadyAll, and reports
// all else by itself. On its own account (`awaited`: its user waits for a part), or because of Unbundle.
struct Split {
  uint32_t bundle = 0;
  bool awaited = false;
  std::vector<int32_t> ready = {};  // in order of submission
};
// Said by the leader of the rank's host, or by the one above it: the rank is gone.
struct Lost {
  Failure failure;
};
// Before a rank's first tensor on a GPU.
struct UseGpu {
  std::string uuid;          // of the GPU
  Rank host = 0;             // the lowest rank of its host
  int32_t nccl_version = 0;  // 0: none that it could use
  std::string name;
};
// How the members of a set find each other in NCCL: from its lowest rank to the coordinator, and from there to
// all in the log.
struct GpuKey {
  SetId set = kWorldSet;
  std::string key;
};
// The rank's user waits: until the rank's next Ready, leaders keep nothing back. It goes no further than
// leaders that gather.
struct Hurry {};
using Report = std::variant<Ready, Refuse, Join, Done, Forgot, Leave, Whereabouts, Inquire,
                            ReadyAll, Split, Lost, UseGpu, GpuKey, Hurry>;

inline bool says_ready(const Report& report) {
  return std::holds_alternative<Ready>(report) || std::holds_alternative<ReadyAll>(report);
}

// ---- The log: coordinator -> all ranks, one total order

struct Define {
  uint32_t id = 0;
  Request request;
};
struct Forget {
  uint32_t id = 0;
};
struct Item {  // one call in a bucket
  uint32_t id = 0;
  uint64_t sequence = 0;  // unnamed calls
  int64_t divisor = 1;
  std::vector<int32_t> absent;  // member indices without input
  std::vector<int64_t> rows;    // as Part::rows
};
struct Run {  // the set's lane moves these bytes
  SetId set = kWorldSet;
  uint64_t bucket = 0;
  std::vector<Item> items;
  std::vector<uint32_t> bundles = {};  // whole ones, behind the items; nothing is absent from them
  bool gpu = false;                    // the lane of GPUs
};
struct Result {  // done at once: the result is here, or nobody had a buffer
  SetId set = kWorldSet;
  uint32_t id = 0;
  uint64_t sequence = 0;
  bool absent = false;
  std::vector<int64_t> rows;  // allgather
  ByteString payload;
};
struct Fail {
  CallKey key;
  Failure failure;
  // Ranks that had not reported the call: a report of theirs that is under way is not about it.
  std::vector<Rank> unheard = {};
};
struct Joined {
  SetId set = kWorldSet;
  Rank last = 0;
  uint64_t next_sequence = 0;  // of unnamed calls in this set, from here on
  Failure failure = {};        // that of a Join
};
struct OpenSet {
  SetId set = 0;
  std::vector<Rank> ranks;
  CallKey key;  // the call that asked for it
};
struct CloseSet {
  SetId set = 0;
  CallKey key;
};
struct Abort {  // the job is broken: everything fails with this, now and later
  Failure failure;
};
struct Stop {};    // all ranks have left
struct WhereAre {  // others wait for these ranks: they answer with their Whereabouts
  std::vector<Rank> ranks;
};
struct Inform {  // the answer to one rank's question
  Rank to = 0;
  uint64_t number = 0;
  std::string text;
};
// Prediction: these calls of a set have come together for some steps. From here on its members may
// report them by ReadyAll, those who have begun this round without it from the next round on.
struct Bundle {
  uint32_t id = 0;  // never used again
  SetId set = kWorldSet;
  std::vector<uint32_t> ids;
};
struct Unbundle {  // no more; every member answers with its Split, if it has not yet
  uint32_t id = 0;
};
// The set's first bucket on GPUs is near: by NCCL (then a GpuKey follows, unless all ranks split the world's
// communicator here), or through host memory.
struct OpenGpu {
  SetId set = kWorldSet;
  bool nccl = false;
  bool split = false;
  std::vector<Rank> ranks;  // of the set
};
using Entry = std::variant<Define, Forget, Run, Result, Fail, Joined, OpenSet, CloseSet, Abort,
                           Stop, WhereAre, Inform, Bundle, Unbundle, OpenGpu, GpuKey>;

void encode(const Report& report, ByteString& out);
void encode(const Entry& entry, ByteString& out);
// Throw Error(kInternal) on anything that encode() would not have written. A Ready's payload points
// into `in`.
Report decode_report(ByteView in);
Entry decode_entry(ByteView in);

}  // namespace farandole
