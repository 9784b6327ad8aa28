// SPDX-License-Identifier: Apache-2.0
// Runs small programs in every possible order of their atomic steps. A program is ordinary code: to take
// one step it is run from its start with what it has observed so far, up to one new step.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

namespace farandole::check {

// Where a program stands: what it remembers on purpose, and what it has observed since.
struct Progress {
  uint8_t memory = 0;
  uint8_t finished = 0;
  uint8_t count = 0;
  std::array<uint8_t, 29> observed{};

  void observe(uint8_t value) { observed.at(count++) = value; }
};

// What one program sees of `Shared`: everything it does there is a step.
template <class Shared>
class Steps {
 public:
  // `change` returns what the program observes: a small number.
  template <class Change>
  uint8_t step(Change&& change) {
    if (next_ == progress_->count) {
      if (stepped_) throw Paused{};
      stepped_ = true;
      progress_->observe(static_cast<uint8_t>(change(*shared_)));
    }
    return progress_->observed[next_++];
  }

  // Waits, then goes on with the next step: no step of its own, for others see nothing of it. What is
  // awaited stays true until this program's next step.
  template <class Condition>
  void await(Condition&& condition) {
    if (next_ == progress_->count) {
      if (stepped_ || !condition(*shared_)) throw Paused{};
      progress_->observe(0);
    }
    ++next_;
  }

  // Begins the program anew with nothing known but `memory`: keeps loops from growing.
  [[noreturn]] void restart(uint8_t memory) {
    *progress_ = {.memory = memory};
    stepped_ = true;
    throw Paused{};
  }
  uint8_t memory() const { return progress_->memory; }

 private:
  template <class>
  friend class Interleavings;
  struct Paused {};

  Steps(Shared* shared, Progress* progress) : shared_(shared), progress_(progress) {}

  Shared* shared_;
  Progress* progress_;
  uint8_t next_ = 0;
  bool stepped_ = false;
};

template <class Shared>
class Interleavings {
 public:
  struct Program {
    std::function<void(Steps<Shared>&)> body;
    uint8_t memory = 0;  // at the start
  };

  // Visits every reachable state until an end (nobody can step) in which `good` does not hold.
  Interleavings(const Shared& start, std::vector<Program> programs,
                std::function<bool(const Shared&)> good)
      : programs_(std::move(programs)), good_(std::move(good)) {
    State first{start, {}};
    for (size_t i = 0; i < programs_.size(); ++i) {
      first.progress.at(i).memory = programs_[i].memory;
    }
    waiting_.push_back(first);
    while (!waiting_.empty() && !bad_) {
      const State state = waiting_.back();
      waiting_.pop_back();
      visit(state);
    }
  }

  size_t states() const { return seen_.size(); }
  size_t ends() const { return ends_; }
  bool bad() const { return bad_; }

 private:
  static constexpr size_t kMostPrograms = 4;

  struct State {
    Shared shared;
    std::array<Progress, kMostPrograms> progress;

    std::string_view bytes() const { return {reinterpret_cast<const char*>(this), sizeof(State)}; }
    bool operator==(const State& other) const { return bytes() == other.bytes(); }
  };
  static_assert(std::has_unique_object_representations_v<State>);  // no padding in bytes()

  struct Hash {
    size_t operator()(const State& state) const {
      return std::hash<std::string_view>()(state.bytes());
    }
  };

  bool take_step(size_t program, State& state) const {
    Progress& progress = state.progress[program];
    if (progress.finished != 0) return false;
    Steps<Shared> steps(&state.shared, &progress);
    try {
      programs_[program].body(steps);
      progress = {.finished = 1};
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
      if (seen_.insert(next).second) waiting_.push_back(next);
    }
    if (!at_end) return;
    ++ends_;
    if (!good_(state.shared)) bad_ = true;
  }

  std::vector<Program> programs_;
  std::function<bool(const Shared&)> good_;
  std::vector<State> waiting_;  // to be visited
  std::unordered_set<State, Hash> seen_;
  size_t ends_ = 0;
  bool bad_ = false;
};

}  // namespace farandole::check
