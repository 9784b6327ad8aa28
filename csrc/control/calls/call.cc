// SPDX-License-Identifier: Apache-2.0
#include "control/calls/call.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "base/error.h"
#include "kernels/kernels.h"

namespace farandole {
namespace {

// The shortest decimal text that reads back as the same value.
std::string number(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

// Fields that ranks may disagree on, the most telling first.
struct Field {
  const char* name;
  std::string (*text)(const Request&);
};

constexpr Field kFields[] = {
    {"group size", [](const Request& r) { return std::to_string(r.signature.group_size); }},
    {"operation", [](const Request& r) { return std::string(name_of(r.signature.op)); }},
    {"dtype", [](const Request& r) { return std::string(name_of(r.signature.dtype)); }},
    {"shape", [](const Request& r) { return text_of(r.signature.shape); }},
    {"reduce op", [](const Request& r) { return std::string(name_of(r.signature.reduce_op)); }},
    {"root rank", [](const Request& r) { return std::to_string(r.signature.root); }},
    {"prescale factor", [](const Request& r) { return number(r.signature.prescale); }},
    {"postscale factor", [](const Request& r) { return number(r.signature.postscale); }},
    {"device",
     [](const Request& r) {
       return std::string(r.signature.device == kCpuDevice ? "CPU" : "GPU");
     }},
    {"group", [](const Request& r) { return r.group.empty() ? "none" : "'" + r.group + "'"; }},
};

}  // namespace

void Inputs::begin(int members) {
  if (members_ != members) with_input_ = MemberMask(members);
  members_ = members;
  with_input_.clear();
  count_ = rode_along_ = 0;
  rows_.clear();
}

void Inputs::end() {
  payloads_ = {};
  extents_ = {};
}

bool Inputs::sound(const Signature& s, const Contribution& given, int members) {
  if (!given.has_input) return given.rows == 0 && !given.has_payload && given.splits.empty();
  const CollectiveTraits& traits = s.traits();
  int64_t bytes = static_cast<int64_t>(size_of(s.dtype));
  if (traits.ragged() || given.has_payload) {
    for (size_t i = 0; i < s.shape.size(); ++i) {
      int64_t length = i == 0 && traits.ragged() ? given.rows : s.shape[i];
      if (length < 0 || __builtin_mul_overflow(bytes, length, &bytes)) return false;
    }
  }
  if (given.has_payload) {
    bool rides =
        traits.rides_along && (!traits.reduces() || kernels::supports(s.dtype, s.reduce_op));
    if (!rides || given.payload.size() > kTinyBytes) return false;
    if (!std::cmp_equal(given.payload.size(), bytes)) return false;
  }
  if (!traits.splits()) return true;
  int64_t rows = 0;
  for (int64_t n : given.splits) {
    if (n < 0 || n > given.rows - rows) return false;
    rows += n;
  }
  return std::cmp_equal(given.splits.size(), members);
}

void Inputs::add_rows(int member, const Signature& signature, const Contribution& given) {
  rows_.resize(told_rows(signature));
  if (!given.has_input) return;
  const CollectiveTraits& traits = signature.traits();
  const size_t first =
      traits.first_told(static_cast<size_t>(member), static_cast<size_t>(members_));
  if (traits.splits()) {
    std::ranges::copy(given.splits, rows_.begin() + static_cast<ptrdiff_t>(first));
  } else {
    rows_[first] = given.rows;
  }
}

void Inputs::add_payload(int member, ByteView payload) {
  const auto n = static_cast<size_t>(members_);
  ++rode_along_;
  if (extents_.empty()) payloads_.reserve(n * payload.size());
  extents_.resize(n);
  extents_[static_cast<size_t>(member)] = {static_cast<uint32_t>(payloads_.size()),
                                           static_cast<uint32_t>(payload.size())};
  payloads_.insert(payloads_.end(), payload.begin(), payload.end());
}

void Inputs::add_all(const MemberSlice& members) {
  with_input_.insert_all(members.first_word, members.words, members.count);
  count_ += members.count;
}

ByteView Inputs::payload(int member) const {
  if (extents_.empty()) return {};
  const Extent& extent = extents_[static_cast<size_t>(member)];
  return ByteView(payloads_).subspan(extent.offset, extent.bytes);
}

std::vector<int32_t> Inputs::absent_members() const {
  if (count_ == members_) return {};
  return with_input_.missing();
}

size_t Inputs::bytes(const Signature& s) const {
  if (rows_.empty()) return s.bytes();
  size_t rows = 0;
  for (int64_t n : rows_) rows += static_cast<size_t>(n);
  return rows * s.row_bytes();
}

std::string text_of(const RanksByValue& opinions) {
  std::string text;
  for (const auto& [value, ranks] : opinions) {
    text += (text.empty() ? "" : ", ") + value + " on " + text_of_ranks(ranks);
  }
  return text;
}

std::string text_of(const CallKey& key, const Request& request) {
  std::string what =
      key.named() ? "'" + key.name + "'" : "unnamed call " + std::to_string(key.number() + 1);
  if (key.index_in_group() > 0) what += ", tensor " + std::to_string(key.index_in_group() + 1);
  what += std::string(" (") + name_of(request.signature.op) + ")";
  if (key.set != kWorldSet) what += " in process set " + std::to_string(key.set);
  return what;
}

void Terms::begin(const Request* defined, const Request& request) {
  defined_ = defined;
  if (!defined) proposed_ = request;
  versions_.clear();
  silent_.clear();
  joined_ = 0;
  refused_ = {};
}

void Terms::add(int member, const Request& request, const MemberMask& arrived) {
  if (versions_.empty()) versions_.push_back({this->request(), outspoken(arrived)});
  for (Version& version : versions_) {
    const bool alike = same_terms(version.request, request) && version.request.site == request.site;
    if (alike) return version.members.push_back(member);
  }
  versions_.push_back({request, {member}});
}

std::vector<int32_t> Terms::outspoken(const MemberMask& arrived) const {
  std::vector<int32_t> members = arrived.members();
  std::erase_if(members, [&](int32_t m) { return std::ranges::count(silent_, m) > 0; });
  return members;
}

void Terms::add_joined(int member) {
  silent_.push_back(member);
  ++joined_;
}

void Terms::refuse(int member, Failure failure) {
  silent_.push_back(member);
  if (!refused_) refused_ = std::move(failure);
}

std::vector<Terms::Group> Terms::groups() const {
  std::vector<Group> groups;
  auto add = [&](const Request& terms) {
    if (terms.group.empty()) return;
    int size = terms.signature.group_size;
    for (Group& known : groups) {
      if (known.name != terms.group) continue;
      if (known.size != size) known.size = 0;
      return;
    }
    groups.push_back({terms.group, size});
  };
  if (versions_.empty()) add(request());
  for (const Version& version : versions_) add(version.request);
  std::erase_if(groups, [](const Group& terms) { return terms.size == 0; });
  return groups;
}

std::vector<Terms::Led> Terms::led(uint64_t index_in_group, const MemberMask& arrived) const {
  std::vector<Led> led;
  auto add = [&](const Request& terms, size_t members) {
    if (terms.group.empty() || members == 0 || follows(terms, index_in_group)) return;
    led.push_back({terms.group, terms.signature.group_size - 1, static_cast<int>(members)});
  };
  if (versions_.empty()) add(request(), outspoken(arrived).size());
  for (const Version& version : versions_) add(version.request, version.members.size());
  return led;
}

bool Terms::uneven() const {
  if (std::cmp_greater(silent_.size(), joined_)) return true;
  return std::ranges::any_of(versions_, [&](const Version& version) {
    return version.request.signature.group_size != versions_[0].request.signature.group_size;
  });
}

RanksByValue Terms::opinions(std::string (*text)(const Request&),
                             const std::vector<Rank>& ranks) const {
  RanksByValue values;
  for (const Version& version : versions_) {
    std::string value = text(version.request);
    auto found = std::ranges::find(values, value, &RanksByValue::value_type::first);
    if (found == values.end()) found = values.insert(found, {std::move(value), {}});
    for (int32_t m : version.members) found->second.push_back(ranks[static_cast<size_t>(m)]);
  }
  for (auto& [value, who] : values) std::ranges::sort(who);  // they were in order of arrival
  std::ranges::sort(values, {}, [](const auto& row) { return row.second.front(); });
  return values;
}

RanksByValue Terms::sites(const std::vector<Rank>& ranks) const {
  RanksByValue sites = opinions([](const Request& r) { return r.site; }, ranks);
  std::erase_if(sites, [](const auto& row) { return row.first.empty(); });
  return sites.size() < 2 ? RanksByValue{} : sites;
}

std::vector<Request> Terms::of_other_sites() const {
  std::vector<Request> others;
  for (const Version& version : versions_) {
    const bool alike = same_terms(version.request, request());
    if (alike && version.request.site != request().site) others.push_back(version.request);
  }
  return others;
}

std::optional<Failure> Terms::failure(const CallKey& key, const std::vector<Rank>& ranks) const {
  if (refused_) return refused_;
  const bool alike = std::ranges::all_of(versions_, [&](const Version& version) {
    return same_terms(version.request, versions_[0].request);
  });
  if (alike) return std::nullopt;
  std::string text = "ranks disagree about " + farandole::text_of(key, request()) + ": ";
  const RanksByValue from = sites(ranks);
  for (const Field& field : kFields) {
    const RanksByValue values = opinions(field.text, ranks);
    if (values.size() < 2) continue;
    text += std::string(field.name) + " is " + farandole::text_of(values);
    if (!from.empty()) text += "; they call from " + farandole::text_of(from);
    return Failure{
        ErrorCode::kMismatch,
        text + "; make the call the same on all ranks, or give different tensors different names"};
  }
  return Failure{ErrorCode::kMismatch, text + "a factor is not a number"};
}

void Call::open(CallKey key, uint32_t id, const Request* defined, const Request& request,
                int members, int64_t now_ns) {
  open_ = true;
  queued_ = false;
  set_ = key.set;
  key_ = std::move(key);
  id_ = id;
  if (members_ != members) arrived_ = MemberMask(members);
  members_ = members;
  arrived_.clear();
  terms_.begin(defined, request);
  inputs_.begin(members);
  times_ = {now_ns, now_ns};
  given_up_ = {};
  takes_plain_ = defined && !signature().traits().ragged() && !by_members(*defined);
}

void Call::close() {
  open_ = queued_ = false;
  inputs_.end();
}

void Call::take(int member) {
  if (arrived_.insert(member)) return;
  throw Error(ErrorCode::kInternal,
              "a rank reported " + text_of(key_, request()) + " twice before it was done");
}

void Call::arrive(int member, const Request& request, bool same, const Contribution& given) {
  const bool agrees = terms_.match(request, same);
  if (agrees && !Inputs::sound(signature(), given, members_)) {
    throw Error(ErrorCode::kInternal,
                "a rank brings to " + text_of(key_, request) + " what it could not have");
  }
  if (!terms_.agreed() || !terms_.equal(request, same)) {
    terms_.add(member, request, arrived_);
    takes_plain_ = false;
  }
  take(member);
  if (agrees) inputs_.add(member, signature(), given);
}

bool Call::arrive_plain(int member) {
  if (!takes_plain_ || !arrived_.insert(member)) return false;
  inputs_.add_plain(member);
  return true;
}

bool Call::arrive_plain(const MemberSlice& members) {
  if (!takes_plain_) return false;
  if (!arrived_.insert_all(members.first_word, members.words, members.count)) return false;
  inputs_.add_all(members);
  return true;
}

void Call::arrive_joined(int member) {
  take(member);
  terms_.add_joined(member);
  inputs_.add_none(signature());
}

void Call::refuse(int member, Failure failure) {
  // Others may count this member as none of theirs.
  if (!by_members(request())) take(member);
  arrived_.insert(member);
  terms_.refuse(member, std::move(failure));
}

}  // namespace farandole
