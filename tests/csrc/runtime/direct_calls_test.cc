// SPDX-License-Identifier: Apache-2.0
// Calls in cells, on a thread for which memory runs out. A program of its own, because it replaces operator new.
#include <cstdlib>
#include <new>

#include "runtime/runtime_ranks.h"

using namespace farandole;
using namespace farandole::check;

namespace {

thread_local bool fails_next = false;  // this thread's next allocation

// Returns true if the call has been made. It has not if it met with an allocation that failed.
bool make(TestRank& self, const CheckedCall& call, Floats& data, bool without_memory = false) {
  data = values_of(self.rank, data.size());
  const uintptr_t at = address(data.data());
  Handle handle = 0;
  PreparedSubmission one{&call, {&at, 1}, {&at, 1}, {}, {&handle, 1}};
  bool met = false;
  try {
    fails_next = without_memory;
    met = self.runtime()->call(one);
  } catch (const std::bad_alloc&) {
    return false;
  }
  if (!met) self.finish(handle);
  CHECK(data == sum_over(self.size, data.size()));
  return true;
}

}  // namespace

[[gnu::noinline]] void* operator new(size_t bytes) {
  void* const memory =
      std::exchange(fails_next, false) ? nullptr : std::malloc(std::max<size_t>(bytes, 1));
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
    for (int i = 0; i < 5; ++i) CHECK(make(self, call, data));
    if (self.rank == 1) CHECK(!make(self, call, data, true));
    for (int i = 0; i < 5; ++i) CHECK(make(self, call, data));
  });
}
