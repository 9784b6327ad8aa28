// SPDX-License-Identifier: Apache-2.0
// This rank's sends and receives that have not met their other end. Under RankCalls::mutex.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>

#include "runtime/calls/pending.h"

namespace farandole {

class PostedCalls {
 public:
  explicit PostedCalls(Rank own) : own_(own) {}

  // The number of the next one, which a refused call takes, too.
  uint64_t next() const { return next_; }
  uint64_t skip() { return next_++; }
  void add(Submission submission) { waiting_.emplace(next_++, std::move(submission)); }
  // It has met its other end, or failed; nullopt: the job has failed before.
  std::optional<Submission> take(uint64_t number) {
    auto node = waiting_.extract(number);
    return node ? std::optional(std::move(node.mapped())) : std::nullopt;
  }
  // The call of this handle; nullopt: not here.
  std::optional<CallKey> key_of(Handle handle) const {
    for (const auto& [number, submission] : waiting_) {
      if (submission.handle == handle) return CallKey{submission.recorded.set, {}, number, own_};
    }
    return std::nullopt;
  }
  void clear() { waiting_.clear(); }

 private:
  const Rank own_;
  uint64_t next_ = 0;
  std::map<uint64_t, Submission> waiting_;
};

}  // namespace farandole
