// SPDX-License-Identifier: Apache-2.0
#include "runtime/simulation/kernel.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <limits>

#include "check.h"

// Present in programs built with AddressSanitizer only, which wants to know of stacks.
extern "C" {
[[gnu::weak]] void __sanitizer_start_switch_fiber(void** save, const void* bottom, size_t bytes);
[[gnu::weak]] void __sanitizer_finish_switch_fiber(void* saved, const void** bottom, size_t* bytes);
}

namespace farandole::simulation {
namespace {

constexpr size_t kStackBytes = size_t{256} << 10;
constexpr int64_t kTurnNs = 2000;  // at most
constexpr uint64_t kNumbers = 1;

struct Dropped {};  // thrown on the stacks of a rank that is gone

// A place to go on from. setjmp's makes a system call, the compiler's does not.
using Place = void* [5];

[[gnu::noinline]] void jump(Place& to) { __builtin_longjmp(to, 1); }

// Stacks are used again, by later worlds too.
std::vector<std::byte*>& free_stacks() {
  static std::vector<std::byte*> stacks;
  return stacks;
}

std::byte* take_stack() {
  auto& free = free_stacks();
  if (!free.empty()) {
    std::byte* stack = free.back();
    free.pop_back();
    return stack;
  }
  void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  CHECK(memory != MAP_FAILED);
  mprotect(memory, 4096, PROT_NONE);
  return static_cast<std::byte*>(memory);
}

Place main_place;
const void* main_bottom = nullptr;
size_t main_bytes = 0;

}  // namespace

class Fiber {
 public:
  Fiber(int its_number, Rank its_rank, std::function<void()> its_run)
      : number(its_number), rank(its_rank), run(std::move(its_run)), stack(take_stack()) {}
  ~Fiber() {
    if (stack) free_stacks().push_back(stack);
  }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // On the main stack: until the fiber's turn ends.
  [[gnu::noinline]] void enter() {
    void* fake = nullptr;
    if (__sanitizer_start_switch_fiber) {
      __sanitizer_start_switch_fiber(&fake, stack, kStackBytes);
    }
    if (__builtin_setjmp(main_place) == 0) {
      if (started) jump(place);
      started = true;
      ucontext_t context;
      getcontext(&context);
      context.uc_stack.ss_sp = stack;
      context.uc_stack.ss_size = kStackBytes;
      context.uc_link = nullptr;
      const auto self = reinterpret_cast<uintptr_t>(this);
      makecontext(&context, reinterpret_cast<void (*)()>(&Fiber::begin), 2,
                  static_cast<unsigned>(self), static_cast<unsigned>(self >> 32));
      setcontext(&context);
    }
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
  }
  // On the fiber's own: until the next enter().
  [[gnu::noinline]] void leave() {
    void* fake = nullptr;
    if (__sanitizer_start_switch_fiber) {
      __sanitizer_start_switch_fiber(ended ? nullptr : &fake, main_bottom, main_bytes);
    }
    if (__builtin_setjmp(place) == 0) jump(main_place);
    if (__sanitizer_finish_switch_fiber) __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
  }

  const int number;
  const Rank rank;
  std::function<void()> run;
  std::byte* stack;
  Place place{};
  bool started = false, ended = false, dropped = false;
  bool woken = false;
  uint64_t turn = 0;  // events of earlier ones are void
  std::pair<uint64_t, uint64_t> word;
  uint32_t bits = 0;
  std::exception_ptr error;

 private:
  static void begin(unsigned low, unsigned high) {
    if (__sanitizer_finish_switch_fiber) {
      __sanitizer_finish_switch_fiber(nullptr, &main_bottom, &main_bytes);
    }
    auto* self = reinterpret_cast<Fiber*>(uintptr_t{high} << 32 | low);
    self->live();
    self->leave();
  }
  void live() {
    try {
      if (!dropped) run();
    } catch (const Dropped&) {
    } catch (...) {
      error = std::current_exception();
    }
    run = nullptr;
    ended = true;
  }
};

Kernel::Kernel(uint64_t seed) : random_(seed) { g_simulated_kernel = this; }

Kernel::~Kernel() { g_simulated_kernel = nullptr; }

Fiber& Kernel::make(Rank rank, std::function<void()> run) {
  const int number = static_cast<int>(fibers_.size()) + 1;
  fibers_.push_back(std::make_unique<Fiber>(number, rank, std::move(run)));
  return *fibers_.back();
}

void Kernel::spawn(Rank rank, std::function<void()> run) {
  schedule(make(rank, std::move(run)), turn_of(rank));
}

// Its starter may hold locks.
int Kernel::start(std::function<void()> run) {
  Fiber& made = make(running_->rank, std::move(run));
  schedule(made, turn_of(made.rank));
  return made.number;
}

void Kernel::join(int thread) {
  Fiber& other = *fibers_.at(static_cast<size_t>(thread) - 1);
  const uint64_t number = uint64_t{1} << 40 | static_cast<uint64_t>(thread);
  while (!other.ended) sleep_for(number, kNever);
}

// ---- Sleep

void Kernel::map(const std::byte* begin, size_t bytes, uint64_t segment) {
  const auto from = reinterpret_cast<uintptr_t>(begin);
  auto next = mapped_.lower_bound(from);
  if (next != mapped_.begin() && std::prev(next)->second.end > from) --next;
  while (next != mapped_.end() && next->first < from + bytes) next = mapped_.erase(next);
  mapped_[from] = {from + bytes, segment};
}

Kernel::Word Kernel::word_of(const void* address) const {
  const auto at = reinterpret_cast<uintptr_t>(address);
  auto next = mapped_.upper_bound(at);
  if (next == mapped_.begin() || std::prev(next)->second.end <= at) return {0, at};
  --next;
  return {next->second.segment, at - next->first};
}

bool Kernel::sleep(const std::atomic<uint32_t>& word, uint32_t bits, int64_t until_ns) {
  return sleep(word_of(&word), bits, until_ns);
}

int Kernel::wake(const std::atomic<uint32_t>& word, int count, uint32_t bits) {
  return wake(word_of(&word), count, bits);
}

void Kernel::sleep_for(uint64_t number, int64_t until_ns) {
  sleep(Word{kNumbers, number}, 1, until_ns);
}

void Kernel::wake_all(uint64_t number) {
  wake(Word{kNumbers, number}, std::numeric_limits<int>::max(), 1);
}

bool Kernel::sleep(const Word& word, uint32_t bits, int64_t until_ns) {
  Fiber& self = *running_;
  self.word = word;
  self.bits = bits;
  self.woken = false;
  sleepers_[word].push_back(&self);
  if (until_ns != kNever) schedule(self, std::max(until_ns, turn_of(self.rank)));
  leave_turn();
  return self.woken;
}

int Kernel::wake(const Word& word, int count, uint32_t bits) {
  auto found = sleepers_.find(word);
  if (found == sleepers_.end()) return 0;
  std::vector<Fiber*> woken;
  for (Fiber* sleeper : found->second) {
    const bool meant = (sleeper->bits & bits) != 0 && std::cmp_less(woken.size(), count);
    if (meant) woken.push_back(sleeper);
  }
  for (Fiber* sleeper : woken) {
    std::erase(found->second, sleeper);
    sleeper->woken = true;
    schedule(*sleeper, turn_of(sleeper->rank));
  }
  if (found->second.empty()) sleepers_.erase(found);
  return static_cast<int>(woken.size());
}

// Not always, so that a thread also makes several steps at once.
void Kernel::yield() {
  if (!running_ || random_.chance(0.5)) return;
  schedule(*running_, turn_of(running_->rank));
  leave_turn();
}

// ---- Turns

int64_t Kernel::turn_of(Rank rank) {
  auto slow = slowness_.find(rank);
  const int64_t time = now_ + delay(kTurnNs) * (slow == slowness_.end() ? 1 : slow->second);
  return std::max(time, stopped_until(rank));
}

int64_t Kernel::stopped_until(Rank rank) const {
  auto stopped = stopped_.find(rank);
  return stopped == stopped_.end() ? 0 : stopped->second;
}

void Kernel::schedule(Fiber& fiber, int64_t time_ns) {
  events_.push({time_ns, order_++, &fiber, ++fiber.turn, nullptr});
}

void Kernel::at(int64_t time_ns, std::function<void()> event) {
  events_.push({std::max(time_ns, now_), order_++, nullptr, 0,
                std::make_shared<std::function<void()>>(std::move(event))});
}

void Kernel::leave_turn() {
  Fiber& self = *running_;
  self.leave();
  if (self.dropped) throw Dropped{};
}

void Kernel::resume(Fiber& fiber) {
  if (auto found = sleepers_.find(fiber.word); found != sleepers_.end()) {
    std::erase(found->second, &fiber);
    if (found->second.empty()) sleepers_.erase(found);
  }
  ++fiber.turn;
  running_ = &fiber;
  fiber.enter();
  running_ = nullptr;
  if (!fiber.ended) return;
  if (fiber.error) std::rethrow_exception(std::exchange(fiber.error, nullptr));
  if (std::byte* stack = std::exchange(fiber.stack, nullptr)) free_stacks().push_back(stack);
  wake_all(uint64_t{1} << 40 | static_cast<uint64_t>(fiber.number));
}

void Kernel::drop(Rank rank) {
  CHECK(running_ == nullptr);
  for (size_t i = 0; i < fibers_.size(); ++i) {
    Fiber& fiber = *fibers_[i];
    if (fiber.rank != rank || fiber.ended) continue;
    fiber.dropped = true;
    resume(fiber);
  }
}

bool Kernel::step() {
  ++steps_;
  while (!events_.empty() && events_.top().time < kNever) {
    Event event = events_.top();
    events_.pop();
    if (event.fiber && (event.fiber->ended || event.turn != event.fiber->turn)) continue;
    if (const int64_t goes_on = event.fiber ? stopped_until(event.fiber->rank) : 0;
        goes_on > event.time) {
      event.time = goes_on;
      events_.push(std::move(event));
      continue;
    }
    now_ = std::max(now_, event.time);
    if (event.fiber) {
      resume(*event.fiber);
    } else {
      (*event.call)();
    }
    return true;
  }
  return false;
}

}  // namespace farandole::simulation
