// SPDX-License-Identifier: Apache-2.0
#include "control/calls/terms.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "base/error.h"

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
    {"place in GPU memory", [](const Request& r) { return text_of(r.signature.window_range); }},
    {"group", [](const Request& r) { return r.group.empty() ? "none" : "'" + r.group + "'"; }},
};

}  // namespace

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

}  // namespace farandole
