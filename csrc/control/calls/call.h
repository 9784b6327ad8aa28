// SPDX-License-Identifier: Apache-2.0
// One call in flight, as the coordinator knows it: the members that have reported it, their inputs and their requests.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "control/calls/member_mask.h"
#include "control/protocol/message.h"

namespace farandole {

// The inputs of one tensor of a call: which members have one, their rows, and payloads that came with reports.
class Inputs {
 public:
  void begin(int members);
  void end();  // frees memory, because thousands of definitions may have no call

  // True if a member's contribution is valid. Repeats the rank's checks, because later code relies on these sizes.
  static bool sound(const Signature& signature, const Contribution& given, int members);
  void add(int member, const Signature& signature, const Contribution& given) {
    if (given.has_input) add_plain(member);
    if (signature.traits().ragged()) add_rows(member, signature, given);
    if (given.has_payload) add_payload(member, given.payload);
  }
  // Adds a member with a plain contribution.
  void add_plain(int member) {
    with_input_.insert(member);
    ++count_;
  }
  void add_all(const MemberSlice& members);
  // Adds a member that has joined.
  void add_none(const Signature& signature) { rows_.resize(logged_rows(signature)); }

  bool has(int member) const { return with_input_.contains(member); }
  int count() const { return count_; }
  bool absent() const { return count_ == 0; }
  std::vector<int32_t> absent_members() const;
  bool rode_along() const { return rode_along_ == count_; }
  const std::vector<int64_t>& rows() const { return rows_; }  // in the layout of the log entry
  // Returns the payload of a member, or an empty view if there is none.
  ByteView payload(int member) const;
  const ByteString& payloads() const { return payloads_; }  // in order of arrival
  size_t bytes(const Signature& signature) const;           // bytes to move; limited per bucket

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
  ByteString payloads_;  // concatenated
  // The place of each member's payload in payloads_. Empty if there are no payloads.
  std::vector<Extent> extents_;
};

// The name of a call, or of one tensor of a group, as shown in error messages: "'grad.w' (allreduce)".
std::string text_of(const CallKey& key, const Request& request, size_t part = 0);

// Values, each with the ranks that gave it. Values are ordered by their lowest rank.
using RanksByValue = std::vector<std::pair<std::string, std::vector<Rank>>>;
// Returns a text such as "(3, 4) on rank 0, (4, 3) on ranks 1-2".
std::string text_of(const RanksByValue& opinions);

// Collects the requests of a call's members and checks if they agree.
class Terms {
 public:
  // Starts with the request of the first report. If the report has an id, `defined` is the request for which the id
  // stands, and must outlive the call. If `defined` is null, copies `request`.
  void begin(const Request* defined, const Request& request);

  const Request& request() const { return defined_ ? *defined_ : proposed_; }
  bool redefines() const { return defined_ == nullptr; }
  // True while all reports agree, including on the site.
  bool agreed() const { return versions_.empty(); }
  // True if the request has this call's terms. `same` is true if the report has this call's id.
  bool match(const Request& request, bool same) const {
    return same || same_terms(request, this->request());
  }
  // Like match(), but also compares the sites.
  bool equal(const Request& request, bool same) const {
    return same || (same_terms(request, this->request()) && request.site == this->request().site);
  }

  // Call this if the report or an earlier one differs from the first. `arrived` holds the members that reported before.
  void add(int member, const Request& request, const MemberMask& arrived);
  // Adds a member that has joined. It has no terms.
  void add_joined(int member);
  // Adds a refusal, which will make the call fail.
  void refuse(int member, Failure failure);
  const Failure& refused() const { return refused_; }  // the first refusal, or kOk if there is none
  bool joined(int member) const { return std::ranges::count(joined_, member) > 0; }

  // Returns the members that have reported terms, which are those that have neither joined nor refused.
  std::vector<int32_t> outspoken(const MemberMask& arrived) const;

  // Call this once all members have reported. Returns why the call fails, or nullopt. ranks[m]: world rank of member m.
  std::optional<Failure> failure(const CallKey& key, const std::vector<Rank>& ranks) const;
  // Returns the sites of the call, with the ranks of each site. Returns an empty list if there is only one site.
  RanksByValue sites(const std::vector<Rank>& ranks) const;
  // Returns the members' requests that differ from request() only in the site.
  std::vector<Request> of_other_sites() const;

 private:
  struct Version {  // a version of the request, including the site, and the members that sent it
    Request request;
    std::vector<int32_t> members;
  };
  template <class Text>
  RanksByValue opinions(const Text& text, const std::vector<Rank>& ranks) const;
  const Request* defined_ = nullptr;
  Request proposed_;
  std::vector<Version> versions_;  // empty while all members agree
  std::vector<int32_t> silent_;    // members that have joined or refused
  std::vector<int32_t> joined_;    // the members of silent_ that have joined
  Failure refused_;
};

// A call is first closed. It is open after the first report, queued once all members have reported and agree, and
// closed again when it is published. An open call may also fail, and is then closed. However, an unnamed call that has
// failed early stays open until all members have reported.
class Call {
 public:
  // See Terms::begin() for `defined`.
  void open(CallKey key, uint32_t id, const Request* defined, const Request& request, int members,
            int64_t now_ns);
  void close();
  bool is_open() const { return open_; }
  // Call this when all members have reported and agree. The call then waits to be published.
  void queue() { queued_ = true; }
  bool is_queued() const { return queued_; }
  // Makes an unnamed call fail before all members have reported. Later reports of the call fail at once.
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
  size_t bytes() const;     // total bytes of all tensors
  bool absent() const;      // true if no member has a buffer
  bool rode_along() const;  // true if every input came with its report

  // Takes a member's report. `same` is true if the report has this call's id. Throws Error(kInternal) if the report is
  // invalid or the member has already reported.
  void arrive(int member, const Request& request, bool same, const Ready& ready);
  // Both take plain contributions that have the call's id. They return false if arrive() must take them instead.
  bool arrive_plain(int member);
  bool arrive_plain(const MemberSlice& members);
  // Records that a member that this by_members() call does not need has reported different terms. The call will fail.
  void contradict(int member, const Request& request) {
    terms_.add(member, request, arrived_);
    takes_plain_ = false;
  }
  // Counts as arrived a member that has joined, has left or does not take part.
  void arrive_joined(int member);
  // Takes a member's refusal. The call fails once all members have reported.
  void refuse(int member, Failure failure);
  // True if the member itself has reported this call. Its next report of this name belongs to the next call.
  bool heard(int member) const { return arrived_.contains(member) && !terms_.joined(member); }
  // A report of the next call, which is kept until this call has ended.
  struct Later {
    Rank from;
    ByteString report;
  };
  void put_off(Rank from, const Report& report);
  bool puts_off(Rank from) const { return std::ranges::count(later_, from, &Later::from) > 0; }
  std::vector<Later> take_later() { return std::exchange(later_, {}); }
  const MemberMask& arrived() const { return arrived_; }
  bool complete() const { return arrived_.full(); }

  int64_t since_ns() const { return since_ns_; }  // time of the first report

 private:
  void take(int member);
  Inputs& part(size_t i) { return i == 0 ? inputs_ : more_[i - 1]; }

  // A plain contribution uses only the fields from here to inputs_. They are adjacent, to fit in few cache lines.
  bool open_ = false;
  bool queued_ = false;
  // True while all reports agree with the definition. A plain contribution with the id then only adds an input.
  bool takes_plain_ = false;
  SetId set_ = kWorldSet;
  uint32_t id_ = 0;
  int members_ = 0;
  MemberMask arrived_;
  Inputs inputs_;
  std::vector<Inputs> more_;  // one for each element of Request::more
  int64_t since_ns_ = 0;
  CallKey key_;
  Terms terms_;
  Failure given_up_;
  std::vector<Later> later_;
};

}  // namespace farandole
