// SPDX-License-Identifier: Apache-2.0
// Runs small programs in every possible order of their atomic steps. A program is ordinary code: to take
// one step it is run from its start with what it has observed so far, up to one new step.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>
#include <unordered_set>
#include <vector>

namespace farandole::check {

// Where a program stands: what it remembers on purpose, and what it has observed since.
struct Progress {
  uint32_t memory = 0;
  bool finished = false;
  std::vector<uint32_t> observed;
};

// What one program sees of `Shared`: everything it does there is a step.
template <class Shared>
class Steps {
 public:
  // `change` returns what the program observes.
  template <class Change>
  uint32_t step(Change&& change) {
    if (next_ < progress_->observed.size()) return progress_->observed[next_++];
    if (stepped_) throw Paused{};
    stepped_ = true;
    progress_->observed.push_back(change(*shared_));
    return progress_->observed[next_++];
  }

  // Waits, then goes on with the next step: no step of its own, for others see nothing of it. What is
  // awaited stays true until this program's next step.
  template <class Condition>
  void await(Condition&& condition) {
    if (next_ < progress_->observed.size()) {
      ++next_;
      return;
    }
    if (stepped_ || !condition(*shared_)) throw Paused{};
    progress_->observed.push_back(0);
    ++next_;
  }

  // Begins the program anew with nothing known but `memory`: keeps loops from growing.
  [[noreturn]] void restart(uint32_t memory = 0) {
    *progress_ = {memory, false, {}};
    stepped_ = true;
    throw Paused{};
  }
  uint32_t memory() const { return progress_->memory; }

 private:
  template <class>
  friend class Interleavings;
  struct Paused {};

  Steps(Shared* shared, Progress* progress) : shared_(shared), progress_(progress) {}

  Shared* shared_;
  Progress* progress_;
  size_t next_ = 0;
  bool stepped_ = false;
};

template <class Shared>
class Interleavings {
  static_assert(std::has_unique_object_representations_v<Shared>);  // compared as bytes

 public:
  struct Program {
    std::function<void(Steps<Shared>&)> body;
    uint32_t memory = 0;  // at the start
  };

  // Visits every reachable state until an end (nobody can step) in which `good` does not hold.
  Interleavings(const Shared& start, std::vector<Program> programs,
                std::function<bool(const Shared&)> good)
      : programs_(std::move(programs)), good_(std::move(good)) {
    waiting_.push_back({start, {}});
    for (const Program& program : programs_) {
      waiting_.back().progress.push_back({program.memory, false, {}});
    }
    while (!waiting_.empty() && !bad_) {
      const State state = std::move(waiting_.back());
      waiting_.pop_back();
      visit(state);
    }
  }

  size_t states() const { return seen_.size(); }
  size_t ends() const { return ends_; }
  bool bad() const { return bad_; }

 private:
  struct State {
    Shared shared;
    std::vector<Progress> progress;  // of each program
  };

  static std::string key_of(const State& state) {
    std::string key(reinterpret_cast<const char*>(&state.shared), sizeof(Shared));
    for (const Progress& progress : state.progress) {
      key.push_back(static_cast<char>(progress.finished));
      key.push_back(static_cast<char>(progress.memory));
      key.push_back(static_cast<char>(progress.observed.size()));
      for (const uint32_t value : progress.observed) key.push_back(static_cast<char>(value));
    }
    return key;
  }

  bool take_step(size_t program, State& state) const {
    Progress& progress = state.progress[program];
    if (progress.finished) return false;
    Steps<Shared> steps(&state.shared, &progress);
    try {
      programs_[program].body(steps);
      progress = {0, true, {}};
    } catch (const typename Steps<Shared>::Paused&) {
      return steps.stepped_;
    }
    return true;
  }

  void visit(const State& state) {
    bool at_end = true;
    for (size_t program = 0; program < programs_.size(); ++program) {
      State next = state;
      if (!take_step(program, next)) continue;
      at_end = false;
      if (seen_.insert(key_of(next)).second) waiting_.push_back(std::move(next));
    }
    if (!at_end) return;
    ++ends_;
    if (!good_(state.shared)) bad_ = true;
  }

  std::vector<Program> programs_;
  std::function<bool(const Shared&)> good_;
  std::vector<State> waiting_;  // to be visited
  std::unordered_set<std::string> seen_;
  size_t ends_ = 0;
  bool bad_ = false;
};

}  // namespace farandole::check
