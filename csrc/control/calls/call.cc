// SPDX-License-Identifier: Apache-2.0
#include "control/calls/call.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "base/error.h"
#include "kernels/kernels.h"

namespace farandole {
namespace {

// Returns the shortest decimal text that reads back as the same value.
std::string number(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

// The fields on which ranks may disagree. The most informative field comes first.
struct Field {
  const char* name;
  std::string (*text)(const Signature&);
};

constexpr Field kFields[] = {
    {"operation", [](const Signature& s) { return std::string(name_of(s.op)); }},
    {"dtype", [](const Signature& s) { return std::string(name_of(s.dtype)); }},
    {"shape", [](const Signature& s) { return text_of(s.shape); }},
    {"reduce op", [](const Signature& s) { return std::string(name_of(s.reduce_op)); }},
    {"root rank", [](const Signature& s) { return std::to_string(s.root); }},
    {"prescale factor", [](const Signature& s) { return number(s.prescale); }},
    {"postscale factor", [](const Signature& s) { return number(s.postscale); }},
    {"device",
     [](const Signature& s) { return std::string(s.device == kCpuDevice ? "CPU" : "GPU"); }},
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
  rows_.resize(logged_rows(signature));
  if (!given.has_input) return;
  const CollectiveTraits& traits = signature.traits();
  const size_t first =
      traits.first_logged(static_cast<size_t>(member), static_cast<size_t>(members_));
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

std::string text_of(const CallKey& key, const Request& request, size_t part) {
  std::string what =
      key.named() ? "'" + key.name + "'" : "unnamed call " + std::to_string(key.sequence + 1);
  if (part > 0) what += ", tensor " + std::to_string(part + 1);
  what += std::string(" (") + name_of(request.part(part).op) + ")";
  if (key.set != kWorldSet) what += " in process set " + std::to_string(key.set);
  return what;
}

void Terms::begin(const Request* defined, const Request& request) {
  defined_ = defined;
  if (!defined) proposed_ = request;
  versions_.clear();
  silent_.clear();
  joined_.clear();
  refused_ = {};
}

void Terms::add(int member, const Request& request, const MemberMask& arrived) {
  std::erase(joined_, member);
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
  joined_.push_back(member);
}

void Terms::refuse(int member, Failure failure) {
  silent_.push_back(member);
  std::erase(joined_, member);
  if (!refused_) refused_ = std::move(failure);
}

template <class Text>
RanksByValue Terms::opinions(const Text& text, const std::vector<Rank>& ranks) const {
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
  auto told = [&](size_t part, const std::string& field, const RanksByValue& values) {
    const RanksByValue from = sites(ranks);
    std::string text = "ranks disagree about " + farandole::text_of(key, request(), part) + ": " +
                       field + " is " + farandole::text_of(values);
    if (!from.empty()) text += "; they call from " + farandole::text_of(from);
    return Failure{
        ErrorCode::kMismatch,
        text + "; pass the same arguments on all ranks, or give different tensors different names"};
  };
  auto size = [](const Request& r) { return std::to_string(r.tensors()); };
  auto makers = [](const Request& r) { return std::string(r.alone ? "its members" : "all ranks"); };
  const RanksByValue sizes = opinions(size, ranks);
  if (sizes.size() > 1) return told(0, "group size", sizes);
  for (size_t part = 0; part < request().parts(); ++part) {
    for (const Field& field : kFields) {
      auto text = [&](const Request& r) { return field.text(r.part(part)); };
      const RanksByValue values = opinions(text, ranks);
      if (values.size() > 1) return told(part, field.name, values);
    }
  }
  return told(0, "the set of callers", opinions(makers, ranks));
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
  more_.resize(this->request().more.size());
  for (Inputs& inputs : more_) inputs.begin(members);
  since_ns_ = now_ns;
  given_up_ = {};
  takes_plain_ = defined && !by_members(*defined);
  for (size_t i = 0; takes_plain_ && i < defined->parts(); ++i) {
    takes_plain_ = !defined->part(i).traits().ragged();
  }
}

void Call::close() {
  open_ = queued_ = false;
  inputs_.end();
  for (Inputs& inputs : more_) inputs.end();
}

size_t Call::bytes() const {
  size_t bytes = 0;
  for (size_t i = 0; i < request().parts(); ++i) bytes += inputs(i).bytes(request().part(i));
  return bytes;
}

bool Call::absent() const {
  return inputs_.absent() && std::ranges::all_of(more_, &Inputs::absent);
}

bool Call::rode_along() const {
  auto rode = [](const Inputs& inputs) { return inputs.rode_along() && !inputs.absent(); };
  return rode(inputs_) && std::ranges::all_of(more_, rode);
}

void Call::take(int member) {
  if (arrived_.insert(member)) return;
  throw Error(ErrorCode::kInternal,
              "a rank reported " + text_of(key_, request()) + " twice before the call ended");
}

void Call::arrive(int member, const Request& request, bool same, const Ready& ready) {
  const bool agrees = terms_.match(request, same);
  const Request& terms = this->request();
  bool sound = ready.more.size() == more_.size();
  for (size_t i = 0; sound && i < terms.parts(); ++i) {
    sound = Inputs::sound(terms.part(i), ready.part(i), members_);
  }
  if (agrees && !sound) {
    throw Error(ErrorCode::kInternal,
                "a rank reported an impossible input of " + text_of(key_, request));
  }
  if (!terms_.agreed() || !terms_.equal(request, same)) {
    terms_.add(member, request, arrived_);
    takes_plain_ = false;
  }
  take(member);
  for (size_t i = 0; agrees && i < terms.parts(); ++i) {
    part(i).add(member, terms.part(i), ready.part(i));
  }
}

bool Call::arrive_plain(int member) {
  if (!takes_plain_ || !arrived_.insert(member)) return false;
  inputs_.add_plain(member);
  for (Inputs& inputs : more_) inputs.add_plain(member);
  return true;
}

bool Call::arrive_plain(const MemberSlice& members) {
  if (!takes_plain_) return false;
  if (!arrived_.insert_all(members.first_word, members.words, members.count)) return false;
  inputs_.add_all(members);
  for (Inputs& inputs : more_) inputs.add_all(members);
  return true;
}

void Call::arrive_joined(int member) {
  take(member);
  terms_.add_joined(member);
  for (size_t i = 0; i < request().parts(); ++i) part(i).add_none(request().part(i));
}

void Call::put_off(Rank from, const Report& report) {
  encode(report, later_.emplace_back(Later{from, {}}).report);
}

void Call::refuse(int member, Failure failure) {
  // In a by_members() call, this rank may be missing from the lists of the other members.
  if (!by_members(request())) take(member);
  arrived_.insert(member);
  terms_.refuse(member, std::move(failure));
}

}  // namespace farandole
