// SPDX-License-Identifier: Apache-2.0
// One call in flight, as the coordinator sees it: who has reported, with which inputs, and do they agree.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "control/calls/member_mask.h"
#include "control/protocol/message.h"

namespace farandole {

// The inputs of one call: which members have one, how many rows, and payloads sent with the reports.
class Inputs {
 public:
  void begin(int members);
  void end();  // frees memory, since thousands of calls may be idle

  // Whether a member's contribution is valid: as strict as the rank's own checks, because nobody checks these
  // sizes again.
  static bool sound(const Signature& signature, const Contribution& given, int members);
  void add(int member, const Signature& signature, const Contribution& given) {
    if (given.has_input) add_plain(member);
    if (signature.traits().ragged()) add_rows(member, signature, given);
    if (given.has_payload) add_payload(member, given.payload);
  }
  // Take members with an input and nothing else.
  void add_plain(int member) {
    with_input_.insert(member);
    ++count_;
  }
  void add_all(const MemberSlice& members);
  // Takes a member that has joined.
  void add_none(const Signature& signature) { rows_.resize(logged_rows(signature)); }

  bool has(int member) const { return with_input_.contains(member); }
  int count() const { return count_; }
  // No member has a buffer.
  bool absent() const { return count_ == 0; }
  std::vector<int32_t> absent_members() const;
  // Every input came with its report.
  bool rode_along() const { return rode_along_ == count_; }
  const std::vector<int64_t>& rows() const { return rows_; }  // as the log entry carries them
  // A member's payload; empty: none.
  ByteView payload(int member) const;
  const ByteString& payloads() const { return payloads_; }  // in order of arrival
  size_t bytes(const Signature& signature) const;           // moved by the call; counts for fusion

 private:
  struct Extent {
    uint32_t offset = 0;
    uint32_t bytes = 0;
  };
  void add_rows(int member, const Signature& signature, const Contribution& given);
  void add_payload(int member, ByteView payload);
  size_t logged_rows(const Signature& signature) const {
    return signature.traits().logged_rows(static_cast<size_t>(members_));
  }

  int members_ = 0;
  int count_ = 0;
  MemberMask with_input_;
  int rode_along_ = 0;
  std::vector<int64_t> rows_;
  ByteString payloads_;          // concatenated
  std::vector<Extent> extents_;  // by member, in payloads_; empty before the first
};

// What each member of a call requested, and whether they agree.

// "'grad.w' (allreduce)": how error messages name a call, or one tensor of a group.
std::string text_of(const CallKey& key, const Request& request, size_t part = 0);

// What ranks say, and who says it: by the lowest rank of each opinion.
using RanksByValue = std::vector<std::pair<std::string, std::vector<Rank>>>;
// "(3, 4) on rank 0, (4, 3) on ranks 1-2"
std::string text_of(const RanksByValue& opinions);

class Terms {
 public:
  // The first report sets the terms. `defined`: the request of its id (referenced; it outlives the call), or
  // null to keep a copy of `request`.
  void begin(const Request* defined, const Request& request);

  const Request& request() const { return defined_ ? *defined_ : proposed_; }
  bool redefines() const { return defined_ == nullptr; }
  bool agreed() const { return versions_.empty(); }  // all reports so far, also about the site
  // `same`: the request has this call's id.
  bool match(const Request& request, bool same) const {
    return same || same_terms(request, this->request());
  }
  // The same, also about the site.
  bool equal(const Request& request, bool same) const {
    return same || (same_terms(request, this->request()) && request.site == this->request().site);
  }

  // Adds a report, if it or an earlier one differs from the first. `arrived`: the members before it.
  void add(int member, const Request& request, const MemberMask& arrived);
  // Adds a member that has joined; it has no terms.
  void add_joined(int member);
  // Adds a refusal; the call will fail.
  void refuse(int member, Failure failure);
  const Failure& refused() const { return refused_; }  // the first; code kOk: none
  bool joined(int member) const { return std::ranges::count(joined_, member) > 0; }

  // Members that have reported terms: neither joined nor refusing.
  std::vector<int32_t> outspoken(const MemberMask& arrived) const;

  // Why the call fails, once all have reported; ranks[m] is the world rank of member m.
  std::optional<Failure> failure(const CallKey& key, const std::vector<Rank>& ranks) const;
  // The sites from which its members make it, each with their ranks, if there are several; else none.
  RanksByValue sites(const std::vector<Rank>& ranks) const;
  // Requests of members that differ from request() in the site only.
  std::vector<Request> of_other_sites() const;

 private:
  struct Version {  // one version of the request, its site included, and the members that sent it
    Request request;
    std::vector<int32_t> members;
  };
  template <class Text>
  RanksByValue opinions(const Text& text, const std::vector<Rank>& ranks) const;
  const Request* defined_ = nullptr;
  Request proposed_;
  std::vector<Version> versions_;  // empty while all agree
  std::vector<int32_t> silent_;    // reported without terms: joined, or refused
  std::vector<int32_t> joined_;    // these of them
  Failure refused_;
};

class Call {
 public:
  // `defined`: see Terms::begin().
  void open(CallKey key, uint32_t id, const Request* defined, const Request& request, int members,
            int64_t now_ns);
  void close();
  bool is_open() const { return open_; }
  // Complete and agreed; only waits to be published.
  void queue() { queued_ = true; }
  bool is_queued() const { return queued_; }
  // Fails it before all members have reported: late ones fail at once. Only for unnamed calls.
  void give_up(Failure failure) {
    given_up_ = std::move(failure);
    takes_plain_ = false;
  }
  const Failure& given_up() const { return given_up_; }

  SetId set() const { return set_; }
  const CallKey& key() const { return key_; }
  uint32_t id() const { return id_; }
  const Terms& terms() const { return terms_; }
  const Inputs& inputs(size_t part = 0) const { return part == 0 ? inputs_ : more_[part - 1]; }
  const Request& request() const { return terms_.request(); }
  const Signature& signature() const { return request().signature; }
  size_t bytes() const;     // of all its tensors
  bool absent() const;      // no member has a buffer
  bool rode_along() const;  // every input came with its report

  // Takes a member's report. `same`: it has this call's id, so the request is the same. Throws
  // Error(kInternal) if the member has reported already or its contributions are invalid.
  void arrive(int member, const Request& request, bool same, const Ready& ready);
  // Takes plain contributions under the call's id from one member, or from several; false: not applicable, no
  // change.
  bool arrive_plain(int member);
  bool arrive_plain(const MemberSlice& members);
  // Notes other terms of a member that this call does without (by_members): the call will fail.
  void contradict(int member, const Request& request) {
    terms_.add(member, request, arrived_);
    takes_plain_ = false;
  }
  // Takes a member that has joined or left, or does not take part; it has no buffer.
  void arrive_joined(int member);
  // Takes a member's refusal; the call fails once all have reported.
  void refuse(int member, Failure failure);
  // True if the member has reported it itself: what it reports more under the name is about the next call.
  bool heard(int member) const { return arrived_.contains(member) && !terms_.joined(member); }
  // Keeps such a report until this call has ended.
  struct Later {
    Rank from;
    ByteString report;
  };
  void put_off(Rank from, const Report& report);
  bool puts_off(Rank from) const { return std::ranges::count(later_, from, &Later::from) > 0; }
  std::vector<Later> take_later() { return std::exchange(later_, {}); }
  const MemberMask& arrived() const { return arrived_; }
  bool complete() const { return arrived_.full(); }

  int64_t since_ns() const { return since_ns_; }  // when the first report came

 private:
  void take(int member);
  Inputs& part(size_t i) { return i == 0 ? inputs_ : more_[i - 1]; }

  // What each plain contribution touches comes first, to be in few cache lines.
  bool open_ = false;
  bool queued_ = false;
  // A plain contribution under its id adds nothing but an input: all agree with its definition.
  bool takes_plain_ = false;
  SetId set_ = kWorldSet;
  uint32_t id_ = 0;
  int members_ = 0;
  MemberMask arrived_;
  Inputs inputs_;
  std::vector<Inputs> more_;  // as Request::more
  int64_t since_ns_ = 0;
  CallKey key_;
  Terms terms_;
  Failure given_up_;
  std::vector<Later> later_;
};

}  // namespace farandole
