// SPDX-License-Identifier: Apache-2.0
// Calls in cells, on a thread for which memory runs out. A program of its own, because it replaces operator new.
#include <cstdlib>
#include <functional>
#include <new>

#include "runtime/runtime_ranks.h"

using namespace farandole;
using namespace farandole::check;

namespace {

using Condition = std::function<bool()>;
thread_local const Condition* fails_if = nullptr;  // fails one allocation of this thread, once true

struct Failing {
  explicit Failing(const Condition& condition) { fails_if = &condition; }
  ~Failing() { fails_if = nullptr; }
};

// Returns false if the call met with an allocation that failed, and was not made.
bool make(TestRank& self, const CheckedCall& call, Floats& data, const Condition& failing) {
  data = values_of(self.rank, data.size());
  Failure failure;
  try {
    const Failing armed(failing);
    failure = self.call(call, data);
  } catch (const std::bad_alloc&) {
    return false;
  }
  if (failure) throw Error(failure.code, failure.text);
  CHECK(data == sum_over(self.size, data.size()));
  return true;
}

bool never() { return false; }

}  // namespace

[[gnu::noinline]] void* operator new(size_t bytes) {
  const bool fails = fails_if && (*fails_if)();
  if (fails) fails_if = nullptr;
  void* const memory = fails ? nullptr : std::malloc(std::max<size_t>(bytes, 1));
  if (!memory) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

// Else the next call of the set would wait for ever until the cell is free, and so would leave().
TEST(a_thread_without_memory_does_not_stay_in_the_cell) {
  run_job(Kind::kThreads, 2, [](TestRank& self) {
    Floats data(3);
    const CheckedCall call = self.prepare(allreduce(data, "met"));
    for (int i = 0; i < 5; ++i) CHECK(make(self, call, data, never));
    if (self.rank == 1) CHECK(!make(self, call, data, [] { return true; }));
    for (int i = 0; i < 5; ++i) CHECK(make(self, call, data, never));
  });
}

// Rank 0 has read the input of rank 1, and has the result that rank 1 lacks.
TEST(a_rank_without_memory_for_the_result_in_a_cell_ends_the_job) {
  run_job(Kind::kThreads, 2, [](TestRank& self) {
    Floats data(3);
    const CheckedCall call = self.prepare(allreduce(data, "met"));
    const auto make_until_met = [&] {
      make(self, call, data, never);  // from now on the set has a cell, and the call a definition
      const std::shared_ptr<Cell> cell = self.runtime()->calls().find_set(kWorldSet)->cell;
      const uint64_t before = cell->completed();
      const Condition failing = [&] { return self.rank == 1 && cell->completed() > before; };
      for (const Deadline deadline = patience(); !deadline.expired();) {
        CHECK(make(self, call, data, failing));
      }
    };
    const auto code = self.rank == 1 ? ErrorCode::kInternal : ErrorCode::kPeer;
    CHECK(contains(CHECK_THROWS(make_until_met(), code), "a result in a cell: std::bad_alloc"));
  });
}
