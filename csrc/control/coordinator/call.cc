// SPDX-License-Identifier: Apache-2.0
#include "control/coordinator/call.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "base/error.h"
#include "kernels/kernels.h"

namespace farandole {
namespace {

// The shortest text that tells this value from all others.
std::string number(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

// The fields that ranks may disagree about, in the order in which they are worth reporting.
struct Field {
  const char* name;
  std::string (*text)(const Request&);
};

constexpr Field kFields[] = {
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
    {"place in GPU memory", [](const Request& r) { return text_of(r.signature.place); }},
    {"group", [](const Request& r) { return r.group.empty() ? "none" : "'" + r.group + "'"; }},
    {"group size", [](const Request& r) { return std::to_string(r.signature.group_size); }},
};

std::vector<Rank> world_ranks(const std::vector<int32_t>& members, const std::vector<Rank>& ranks) {
  std::vector<Rank> result;
  for (int32_t m : members) result.push_back(ranks[static_cast<size_t>(m)]);
  return result;
}

bool same_terms(const Request& a, const Request& b) {
  return a.signature == b.signature && a.group == b.group;
}

}  // namespace

std::string text_of(const CallKey& key, const Request& request) {
  std::string what =
      key.named() ? "'" + key.name + "'" : "unnamed call " + std::to_string(key.sequence + 1);
  what += std::string(" (") + name_of(request.signature.op) + ")";
  if (key.set != kWorldSet) what += " in process set " + std::to_string(key.set);
  return what;
}

void Call::open(CallKey key, uint32_t id, const Request* defined, const Request& request,
                int members, int64_t now_ns) {
  open_ = true;
  queued_ = false;
  key_ = std::move(key);
  id_ = id;
  defined_ = defined;
  if (!defined) proposed_ = request;
  if (members_ != members) {
    arrived_ = MemberMask(members);
    with_input_ = MemberMask(members);
  }
  members_ = members;
  since_ns_ = last_ns_ = now_ns;
  first_member_ = last_member_ = -1;
  remaining_ = members;
  arrived_.clear();
  with_input_.clear();
  inputs_ = rode_along_ = 0;
  rows_.clear();
  versions_.clear();
  silent_.clear();
  joined_ = 0;
  refused_ = {};
  given_up_ = {};
}

void Call::close() {
  open_ = queued_ = false;
  payloads_ = {};  // the memory too: there may be thousands of idle calls
  extents_ = {};
}

void Call::take(int member) {
  if (!arrived_.insert(member)) {
    throw Error(ErrorCode::kInternal,
                "a rank reported " + text_of(key_, request()) + " twice before it was done");
  }
  --remaining_;
}

void Call::disagree(int member, const Request& request) {
  for (Version& version : versions_) {
    if (same_terms(version.request, request)) {
      version.members.push_back(member);
      return;
    }
  }
  versions_.push_back({request, {member}});
}

std::vector<int32_t> Call::members_with_terms() const {
  std::vector<int32_t> members = arrived_.members();
  std::erase_if(members, [&](int32_t m) { return std::ranges::count(silent_, m) > 0; });
  return members;
}

// What a rank's own checks let through, and nothing else: nobody looks at these sizes again.
bool Call::sound(const Contribution& given) const {
  const Signature& s = signature();
  if (!given.has_input && (given.rows != 0 || given.has_payload)) return false;
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
  return std::cmp_equal(given.splits.size(), members_);
}

void Call::arrive(int member, const Request& request, bool same, const Contribution& given) {
  bool agrees = same || same_terms(request, this->request());
  if (agrees && !sound(given)) {
    throw Error(ErrorCode::kInternal,
                "a rank brings to " + text_of(key_, request) + " what it could not have");
  }
  if (!agrees && versions_.empty()) versions_.push_back({this->request(), members_with_terms()});
  take(member);
  if (!versions_.empty()) disagree(member, request);
  if (!agrees) return;

  auto m = static_cast<size_t>(member);
  auto n = static_cast<size_t>(members_);
  if (given.has_input) {
    with_input_.insert(member);
    ++inputs_;
  }
  rows_.resize(told_rows());
  if (signature().traits().rows == Rows::kBrought) rows_[m] = given.rows;
  if (signature().traits().rows == Rows::kPairs) {
    for (size_t to = 0; to < n; ++to) rows_[m * n + to] = given.splits[to];
  }
  if (given.has_payload) {
    ++rode_along_;
    if (extents_.empty()) payloads_.reserve(n * given.payload.size());
    extents_.resize(n);
    extents_[m] = {static_cast<uint32_t>(payloads_.size()),
                   static_cast<uint32_t>(given.payload.size())};
    payloads_.insert(payloads_.end(), given.payload.begin(), given.payload.end());
  }
}

bool Call::arrive_all(const MemberSlice& members) {
  if (signature().traits().ragged() || !versions_.empty()) return false;
  if (!arrived_.insert_all(members.first_word, members.words, members.count)) return false;
  with_input_.insert_all(members.first_word, members.words, members.count);
  remaining_ -= members.count;
  inputs_ += members.count;
  return true;
}

void Call::arrive_joined(int member) {
  take(member);
  silent_.push_back(member);
  ++joined_;
  rows_.resize(told_rows());
}

// Numbers of rows that the log will tell.
size_t Call::told_rows() const {
  const auto n = static_cast<size_t>(members_);
  switch (signature().traits().rows) {
    case Rows::kBrought: return n;
    case Rows::kPairs: return n * n;
    default: return 0;
  }
}

void Call::refuse(int member, Failure failure) {
  take(member);
  silent_.push_back(member);
  if (!refused_) refused_ = std::move(failure);
}

std::vector<Call::GroupTerms> Call::groups() const {
  std::vector<GroupTerms> groups;
  auto add = [&](const Request& terms) {
    if (terms.group.empty()) return;
    int size = terms.signature.group_size;
    for (GroupTerms& known : groups) {
      if (known.name != terms.group) continue;
      if (known.size != size) known.size = 0;
      return;
    }
    groups.push_back({terms.group, size});
  };
  if (versions_.empty()) add(request());
  for (const Version& version : versions_) add(version.request);
  std::erase_if(groups, [](const GroupTerms& terms) { return terms.size == 0; });
  return groups;
}

std::optional<Failure> Call::failure(const std::vector<Rank>& ranks) const {
  if (refused_) return refused_;
  if (versions_.empty()) return std::nullopt;
  std::string text = "ranks disagree about " + farandole::text_of(key_, request()) + ": ";
  for (const Field& field : kFields) {
    std::vector<std::pair<std::string, std::vector<Rank>>> values;
    for (const Version& version : versions_) {
      std::string value = field.text(version.request);
      auto found = values.begin();
      while (found != values.end() && found->first != value) ++found;
      if (found == values.end()) found = values.insert(found, {value, {}});
      for (Rank r : world_ranks(version.members, ranks)) found->second.push_back(r);
    }
    if (values.size() < 2) continue;
    for (auto& [value, who] : values) std::ranges::sort(who);  // they are in order of arrival
    std::ranges::sort(values, {}, [](const auto& row) { return row.second.front(); });
    text += field.name;
    for (size_t i = 0; i < values.size(); ++i) {
      text += (i ? ", " : " is ") + values[i].first + " on " + text_of_ranks(values[i].second);
    }
    return Failure{ErrorCode::kMismatch,
                   text +
                       "; make the call the same on all ranks, or give different tensors "
                       "different names"};
  }
  return Failure{ErrorCode::kMismatch, text + "a factor is not a number"};
}

ByteView Call::payload(int member) const {
  if (extents_.empty()) return {};
  const Extent& extent = extents_[static_cast<size_t>(member)];
  return ByteView(payloads_).subspan(extent.offset, extent.bytes);
}

std::vector<int32_t> Call::absent_members() const {
  if (inputs_ == members_) return {};
  return with_input_.missing();
}

size_t Call::bytes() const {
  const Signature& s = signature();
  if (rows_.empty()) return s.bytes();
  size_t rows = 0;
  for (int64_t n : rows_) rows += static_cast<size_t>(n);
  return rows * s.row_bytes();
}

}  // namespace farandole
