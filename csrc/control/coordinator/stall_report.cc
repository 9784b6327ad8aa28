// SPDX-License-Identifier: Apache-2.0
#include "control/coordinator/stall_report.h"

#include <algorithm>
#include <numeric>
#include <set>

namespace farandole {
namespace {

constexpr size_t kMaxCalls = 20;  // listed in one report
constexpr size_t kMaxRanks = 8;   // whose stacks it shows
constexpr size_t kLongestName = 256;

std::string seconds(int64_t ns) { return std::to_string(ns / 1'000'000'000) + " s"; }

std::string tenths(int64_t ns) {
  const int64_t tenth = ns / 100'000'000;
  return std::to_string(tenth / 10) + "." + std::to_string(tenth % 10) + " s";
}

bool has(const std::vector<Rank>& ranks, Rank rank) { return std::ranges::count(ranks, rank) > 0; }

// Puts every line of `text` on a new line, indented by four blanks.
std::string indented(const std::string& text) {
  std::string result;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    if (end > at) result += "\n    " + text.substr(at, end - at);
    at = end + 1;
  }
  return result;
}

// Probably: layers.1 and layers.2, which both ranks know from earlier steps, are two.
bool same_tensor(const WaitingCall& a, const WaitingCall& b) {
  return near_names(a.name, b.name) && !(a.made_before && b.made_before);
}

// A call that `rank` waits in and that lacks a rank which waits for `rank` in `call`: a deadlock.
const WaitingCall* crossed(const WaitingCall& call, Rank rank,
                           const std::vector<WaitingCall>& all) {
  const WaitingCall* found = nullptr;
  for (const WaitingCall& other : all) {
    if (other.moving || !has(other.here, rank)) continue;
    const bool mutual =
        std::ranges::any_of(other.missing, [&](Rank r) { return has(call.here, r); });
    if (!mutual) continue;
    if (same_tensor(other, call)) return &other;
    if (!found) found = &other;
  }
  return found;
}

// What `rank` has posted: an end that this one could have met, else one between the same ranks, else any.
const WaitingCall* its_message(const WaitingCall& call, Rank rank,
                               const std::vector<WaitingCall>& all) {
  auto closeness = [&](const WaitingCall& other) {
    if (other.end == End::kNone || !has(other.here, rank)) return 0;
    if (!has(other.missing, call.here.front())) return 1;
    return other.end == call.end ? 2 : 3;
  };
  const auto found = std::ranges::max_element(all, {}, closeness);
  return found == all.end() || closeness(*found) == 0 ? nullptr : &*found;
}

// Why the ends of two messages have not met; `other` may be for a third rank. Nobody knows whether a rank waits
// in what it has posted.
std::string why_apart(const WaitingCall& call, const WaitingCall& other) {
  if (!has(other.missing, call.here.front())) return "";
  if (other.end != call.end) {
    return other.tag != call.tag ? ": the tags differ" : ": the process sets differ";
  }
  return call.end == End::kSender
             ? ": both send, and neither has a receive posted; let one of them receive first, or "
               "send by send_async"
             : ": both receive, and neither has sent";
}

}  // namespace

// Levenshtein distance of at most a sixth of the name.
bool near_names(const std::string& a, const std::string& b) {
  if (a.empty() || b.empty() || a == b) return false;
  if (std::max(a.size(), b.size()) > kLongestName) return false;
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0]++;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t changed = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, changed});
    }
  }
  return row.back() <= std::max<size_t>(1, std::max(a.size(), b.size()) / 6);
}

std::string line_of(const WaitingCall& call, int64_t now_ns) {
  const std::string age = seconds(now_ns - call.since_ns);
  if (call.moving) {
    std::string text = call.what + ": submitted by all, but nothing has moved for " + age;
    return call.missing.empty() ? text : text + "; " + text_of_ranks(call.missing) + " stuck";
  }
  std::string text = call.what + ": " + text_of_ranks(call.here) + " waiting for " + age;
  if (call.last_ns - call.since_ns >= 100'000'000) {
    text += " (rank " + std::to_string(call.first) + " first, rank " + std::to_string(call.last) +
            " last, " + tenths(call.last_ns - call.since_ns) + " later)";
  }
  if (call.missing.empty()) return text + ", for the rest of group '" + call.group + "'";
  return text + ", " + text_of_ranks(call.missing) + " missing";
}

std::string cause_of(const WaitingCall& call, Rank rank, const RankState& state,
                     const std::vector<WaitingCall>& all, int64_t now_ns) {
  if (state.stopped) return "is stopped by a signal or a debugger";
  if (call.moving || state.silent) {
    return "does not answer, and neither does its background thread: it is frozen, swaps, or has "
           "no core";
  }
  if (call.end != End::kNone) {
    if (const WaitingCall* other = its_message(call, rank, all)) {
      return "has posted " + other->what + why_apart(call, *other) + "; its last call was " +
             tenths(now_ns - state.heard_ns) + " ago";
    }
  }
  if (const WaitingCall* other = crossed(call, rank, all)) {
    const std::string its = "waits in " + other->what + ", which ";
    const std::string lack =
        text_of_ranks(other->missing) + " lack" + (other->missing.size() == 1 ? "s" : "") + ": ";
    if (same_tensor(*other, call)) {
      return its + lack + "is it the same tensor under a different name?";
    }
    return its + lack +
           "the ranks make these calls in different orders, or under a condition that " +
           "differs between them";
  }
  if (state.heard_ns < 0) {
    return "has made no call yet: it is starting, computes, hangs, or runs different code";
  }
  if (state.heard_ns > call.since_ns && call.end != End::kNone) {
    return "has made other calls since, the last " + tenths(now_ns - state.heard_ns) +
           " ago, but not the other end of this message";
  }
  if (state.heard_ns > call.since_ns) {
    return "has made other calls since, the last " + tenths(now_ns - state.heard_ns) +
           " ago: it does not use this tensor (a condition in the model?), or does not have it";
  }
  return "has made no call for " + tenths(now_ns - state.heard_ns) +
         ": it has run out of data (use join() or drop_last), computes, or hangs";
}

std::string causes_of(const std::vector<WaitingCall>& calls, const std::vector<WaitingCall>& all,
                      const StateOf& state_of, int64_t now_ns) {
  std::string text;
  std::set<Rank> told;
  for (const WaitingCall& call : calls) {
    for (Rank rank : call.missing) {
      if (told.size() >= kMaxRanks || !told.insert(rank).second) continue;
      const RankState state = state_of(rank);
      text += "\n  rank " + std::to_string(rank) + " " + cause_of(call, rank, state, all, now_ns) +
              indented(state.where);
    }
  }
  return text;
}

std::string stall_report(const std::vector<WaitingCall>& calls, const std::vector<WaitingCall>& all,
                         const StateOf& state_of, int64_t now_ns) {
  std::string text = "some ranks wait for others:";
  for (size_t i = 0; i < std::min(calls.size(), kMaxCalls); ++i) {
    text += "\n  " + line_of(calls[i], now_ns);
  }
  if (calls.size() > kMaxCalls) {
    text += "\n  and " + std::to_string(calls.size() - kMaxCalls) + " more";
  }
  return text + causes_of(calls, all, state_of, now_ns);
}

}  // namespace farandole
