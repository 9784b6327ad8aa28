// SPDX-License-Identifier: Apache-2.0
// The coordinator's output since it was last taken: log entries, messages for people, late ranks.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "control/protocol/message.h"

namespace farandole {

class Outbox {
 public:
  // The last rank of a set to be ready for a call, and how long after the first.
  struct LateRank {
    Rank rank;
    int64_t after_ns;
  };

  // Adds a log entry, for all ranks.
  void write(Entry entry) { log_.push_back(std::move(entry)); }
  // Fails a call for ranks that report it too late; one entry per batch serves all of them.
  void fail_late(const CallKey& key, const Failure& failure) {
    if (late_calls_.emplace(key.set, key.name, key.sequence).second) write(Fail{key, failure});
  }
  // Adds a message for people.
  void notice(std::string text) { notices_.push_back(std::move(text)); }
  // Adds a late rank, for metrics.
  void came_last(Rank rank, int64_t after_ns) { late_ranks_.push_back({rank, after_ns}); }

  // Replaces the content of `log` by the entries, in order. Ends the batch.
  void take(std::vector<Entry>& log) {
    log.clear();
    log.swap(log_);
    late_calls_.clear();
  }
  std::vector<std::string> take_notices() { return std::exchange(notices_, {}); }
  void take_late_ranks(std::vector<LateRank>& into) {
    into.clear();
    into.swap(late_ranks_);
  }

 private:
  std::vector<Entry> log_;
  std::set<std::tuple<SetId, std::string, uint64_t>> late_calls_;
  std::vector<std::string> notices_;
  std::vector<LateRank> late_ranks_;
};

}  // namespace farandole
