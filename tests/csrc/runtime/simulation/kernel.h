// SPDX-License-Identifier: Apache-2.0
// The kernel of a simulated world: all threads of all ranks take turns on one thread, each on a stack of its own, and time
// jumps from turn to turn. The same seed gives the same run.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <queue>
#include <utility>
#include <vector>

#include "base/simulated_kernel.h"
#include "base/types.h"
#include "random.h"

namespace farandole::simulation {

class Fiber;

class Kernel final : public SimulatedKernel {
 public:
  explicit Kernel(uint64_t seed);
  ~Kernel() override;
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  // ---- For the core
  int64_t now_ns() override { return now_; }
  bool sleep(const std::atomic<uint32_t>& word, uint32_t bits, int64_t until_ns) override;
  int wake(const std::atomic<uint32_t>& word, int count, uint32_t bits) override;
  void yield() override;
  int start(std::function<void()> run) override;
  void join(int thread) override;

  // ---- For the world
  // Starts a thread of this rank, in a moment.
  void spawn(Rank rank, std::function<void()> run);
  // The thread that calls sleeps, until wake_all(number) or, if that is earlier, `until_ns`.
  void sleep_for(uint64_t number, int64_t until_ns);
  void wake_all(uint64_t number);
  // Calls `event` at that time, between two turns. It must not sleep.
  void at(int64_t time_ns, std::function<void()> event);
  // The rank's threads end where they are. Their stacks unwind, but no other rank sees that.
  void drop(Rank rank);
  // The rank's turns come this many times later.
  void slow_down(Rank rank, int64_t factor) { slowness_[rank] = factor; }
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  // The rank has no turns until then, which may be never.
  void stop(Rank rank, int64_t until_ns) { stopped_[rank] = until_ns; }
  // Words in this memory are those of the segment, wherever it is mapped.
  void map(const std::byte* begin, size_t bytes, uint64_t segment);
  // Runs the next event. False: there is none.
  bool step();
  uint64_t steps() const { return steps_; }
  int64_t delay(int64_t most_ns) {
    return 1 + static_cast<int64_t>(random_.below(static_cast<uint64_t>(most_ns)));
  }
  check::Random& random() { return random_; }

 private:
  using Word = std::pair<uint64_t, uint64_t>;  // segment (0: private memory; 1: numbers), place
  struct Event {
    int64_t time;
    uint64_t order;  // events of one time keep the order in which they were made
    Fiber* fiber;    // null: `call`
    uint64_t turn;   // the fiber's
    std::shared_ptr<std::function<void()>> call;
    bool operator>(const Event& other) const {
      return time != other.time ? time > other.time : order > other.order;
    }
  };
  struct Mapped {
    uintptr_t end;
    uint64_t segment;
  };
  Fiber& make(Rank rank, std::function<void()> run);
  Word word_of(const void* address) const;
  bool sleep(const Word& word, uint32_t bits, int64_t until_ns);
  int wake(const Word& word, int count, uint32_t bits);
  void schedule(Fiber& fiber, int64_t time_ns);
  int64_t turn_of(Rank rank);
  int64_t stopped_until(Rank rank) const;
  void resume(Fiber& fiber);
  void leave_turn();

  check::Random random_;
  int64_t now_ = 1'000'000'000;
  uint64_t steps_ = 0;
  uint64_t order_ = 0;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::vector<std::unique_ptr<Fiber>> fibers_;  // by number, from 1
  Fiber* running_ = nullptr;                    // null: between two turns
  std::map<Word, std::deque<Fiber*>> sleepers_;
  std::map<uintptr_t, Mapped> mapped_;  // by begin
  std::map<Rank, int64_t> slowness_, stopped_;
};

}  // namespace farandole::simulation
