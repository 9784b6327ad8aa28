// SPDX-License-Identifier: Apache-2.0
#include "control/coordinator/diagnosis.h"

#include <algorithm>
#include <set>
#include <sstream>
#include <tuple>
#include <utility>

namespace farandole {
namespace {

constexpr size_t kMaxNames = 3;  // the calls of a larger group are counted, not named

std::string seconds(int64_t ns) { return std::to_string(ns / 1'000'000'000) + " s"; }

// Returns the longest common prefix, up to a dot, of the calls' names, such as "optimizer.0", or "" if there is none.
std::string scope_of(const CallGroup& group) {
  std::string scope = group.front()->key.name + ".";
  for (const WaitingCall* call : group) {
    const std::string& name = call->key.name;
    while (!scope.empty() && !(name + ".").starts_with(scope)) {
      const size_t dot = scope.rfind('.', scope.size() - 2);
      scope = scope.size() < 2 || dot == std::string::npos ? "" : scope.substr(0, dot + 1);
    }
  }
  return scope.empty() ? scope : scope.substr(0, scope.size() - 1);
}

// Returns the optimizer to which a scope belongs: "optimizer.0" for "optimizer.0.group[0]", or "" if there is none.
std::string optimizer_of(const std::string& scope) {
  const size_t dot = scope.find('.');
  if (scope.substr(0, dot) != "optimizer" || dot == std::string::npos) return {};
  return scope.substr(0, scope.find('.', dot + 1));
}

std::string text_of(const CallGroup& group) {
  if (group.size() <= kMaxNames) {
    std::string text;
    for (const WaitingCall* call : group) text += (text.empty() ? "" : ", ") + call->what;
    return text;
  }
  const std::string scope = scope_of(group);
  const std::string optimizer = optimizer_of(scope);
  if (optimizer.empty()) {
    const std::string calls = std::to_string(group.size()) + " calls";
    return calls + (scope.empty() ? "" : " of " + scope) + " (the first: " + group[0]->what + ")";
  }
  const auto gradients = std::ranges::count_if(
      group, [&](const WaitingCall* call) { return call->key.name != optimizer + ".consensus"; });
  return std::to_string(gradients) + " gradients of " + optimizer;
}

// The place at which ranks wait, taken from the frames of their main threads.
struct WaitingPlace {
  std::vector<Rank> ranks = {};
  std::string line = {};  // such as "train.py:9"; empty if it is unknown
  std::string call = {};  // the call in which the ranks wait; empty if they are in backward
  bool backward = false;  // true if the ranks are in torch's backward
  std::set<std::string> loops = {};  // the loops around the line, such as "train.py:7"

  bool same(const WaitingPlace& other) const {
    return std::tie(line, call, backward) == std::tie(other.line, other.call, other.backward);
  }
};

bool is_of_a_library(const std::string& path) {
  return path.find("/site-packages/") != std::string::npos ||
         path.find("/dist-packages/") != std::string::npos ||
         path.find("/lib/python3") != std::string::npos || path.starts_with("<frozen");
}

// Parses a text of StackReporter, such as `  File "train.py", line 9 in main, in the loop of line 7 and of line 5`.
WaitingPlace place_of(const BlockedRank& blocked) {
  WaitingPlace place{.ranks = {blocked.rank}, .call = blocked.call->what};
  std::istringstream lines(blocked.stack);
  bool in_main = false;
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("  File \"")) {
      if (in_main) break;  // the main thread's frames end here
      in_main = line.starts_with("Main thread");
      continue;
    }
    const size_t end = line.rfind("\", line ");
    if (!in_main || end == std::string::npos) continue;
    const std::string path = line.substr(8, end - 8);
    const std::string file = path.substr(path.rfind('/') + 1) + ":";
    std::istringstream rest(line.substr(end + 8));
    size_t number = 0;
    rest >> number;
    if (is_of_a_library(path)) {
      place.backward |= line.ends_with(" in backward") && path.find("/torch/") != std::string::npos;
      continue;
    }
    if (place.line.empty()) place.line = file + std::to_string(number);
    for (size_t at = line.find(" of line ", end); at != std::string::npos;) {
      std::istringstream loop(line.substr(at + 9));
      loop >> number;
      place.loops.insert(file + std::to_string(number));
      at = line.find(" of line ", at + 9);
    }
  }
  if (place.backward) place.call.clear();
  return place;
}

// True if `other` is in all loops of `from` and also in at least one loop that `from` has left.
bool has_left_loop(const WaitingPlace& from, const WaitingPlace& other) {
  if (from.line.empty() || std::ranges::includes(from.loops, other.loops)) return false;
  return (other.backward && !from.backward) || std::ranges::includes(other.loops, from.loops);
}

std::string who_is(const WaitingPlace& place, const std::string& one, const std::string& many) {
  return text_of_ranks(place.ranks) + " " + (place.ranks.size() == 1 ? one : many);
}

std::string where(const WaitingPlace& place) {
  return place.line.empty() ? "" : " (" + place.line + ")";
}

std::string waits(const WaitingPlace& place) {
  if (place.backward) return who_is(place, "is", "are") + " in backward" + where(place);
  return who_is(place, "waits", "wait") + " in " + place.call + where(place);
}

}  // namespace

std::vector<CallGroup> grouped(std::span<const WaitingCall> calls) {
  std::vector<CallGroup> groups;
  for (const WaitingCall& call : calls) {
    const auto found = std::ranges::find_if(groups, [&](const CallGroup& group) {
      const WaitingCall& first = *group[0];
      return !call.moving && !first.moving && call.here == first.here &&
             call.missing == first.missing;
    });
    if (found == groups.end()) {
      groups.push_back({&call});
    } else {
      found->push_back(&call);
    }
  }
  return groups;
}

std::string line_of(const CallGroup& group, int64_t now_ns) {
  const WaitingCall& call = *group[0];
  const std::string age = now_ns < 0 ? "" : " for " + seconds(now_ns - call.since_ns);
  if (call.moving) {
    std::string text = call.what + ": all have submitted it, but it has not ended" + age;
    return call.missing.empty() ? text : text + "; " + text_of_ranks(call.missing) + " stuck";
  }
  return text_of(group) + ": " + text_of_ranks(call.here) + " waiting" + age + ", " +
         text_of_ranks(call.missing) + " missing";
}

std::string diagnosis_of(std::span<const BlockedRank> blocked) {
  std::vector<WaitingPlace> places;
  for (const BlockedRank& one : blocked) {
    WaitingPlace place = place_of(one);
    const auto found = std::ranges::find_if(places, [&](auto& p) { return p.same(place); });
    if (found == places.end()) {
      places.push_back(std::move(place));
    } else {
      found->ranks.push_back(one.rank);
    }
  }
  for (const WaitingPlace& from : places) {
    for (const WaitingPlace& other : places) {
      if (!has_left_loop(from, other)) continue;
      const bool trains = other.backward || !optimizer_of(other.call.substr(1)).empty();
      return who_is(from, "left", "left") + (trains ? " the training loop" : " the loop") +
             where(from) + " while " +
             (other.backward ? waits(other)
                             : who_is(other, "is", "are") + " in it" + where(other)) +
             ": uneven data? use join() or drop_last";
    }
  }
  if (places.empty()) return {};
  std::string text = waits(places[0]);
  if (places.size() > 1) text += " while " + waits(places[1]);
  return text +
         ": make the same calls on all ranks, with the same names and tags, and blocking calls "
         "in the same order (uneven data? use join() or drop_last)";
}

}  // namespace farandole
