// SPDX-License-Identifier: Apache-2.0
// What this rank has asked the coordinator, and its answers.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>

namespace farandole {

class Questions {
 public:
  uint64_t ask() { return ++asked_; }
  void answer(uint64_t number, std::string text) {
    answers_[number] = std::move(text);
    // Who asked may have waited no longer: such answers are not kept for ever.
    if (answers_.size() > kMaxAnswers) answers_.erase(answers_.begin());
  }
  // nullopt: it has not come.
  std::optional<std::string> take(uint64_t number) {
    auto answer = answers_.extract(number);
    return answer ? std::optional(std::move(answer.mapped())) : std::nullopt;
  }

 private:
  static constexpr size_t kMaxAnswers = 64;
  uint64_t asked_ = 0;
  std::map<uint64_t, std::string> answers_;
};

}  // namespace farandole
