// SPDX-License-Identifier: Apache-2.0
// Memory that malloc keeps goes back to the system, when that is due.
#include "runtime/driver.h"

#include <malloc.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "check.h"
#include "lib/os/memory.h"

namespace farandole::check {
namespace {

constexpr size_t kBlocks = 4000, kBytes = 40'000;

struct Free {
  void operator()(void* block) const { std::free(block); }
};
using Block = std::unique_ptr<void, Free>;

// Blocks of malloc's heap, each eighth of which lives on: the holes between them are the heap's.
std::vector<Block> with_holes() {
  std::vector<Block> blocks;
  for (size_t i = 0; i < kBlocks; ++i) {
    blocks.emplace_back(std::malloc(kBytes));
    std::memset(blocks.back().get(), 1, kBytes);
  }
  for (size_t i = 0; i < kBlocks; ++i) {
    if (i % 8 != 0) blocks[i].reset();
  }
  return blocks;
}

}  // namespace

TEST(holes_go_back_to_the_system) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  skip("the sanitizer's own heap");
#endif
  const std::vector<Block> kept = with_holes();
  HeapTrimmer heap(Deadline::at(0));
  const size_t before = resident_bytes();
  heap.trim();  // nothing was used: not due
  CHECK(resident_bytes() + kBlocks * kBytes / 4 > before);
  heap.used();
  heap.trim();
  CHECK(resident_bytes() + kBlocks * kBytes / 2 < before);
  CHECK(heap.due().is_never());
  heap.used();
  CHECK(!heap.due().is_never() && !heap.due().expired());
}

TEST(trimming_costs_a_five_hundredth_of_the_time) {
  using namespace std::chrono_literals;
  CHECK(HeapTrimmer::pause_after(2ms, 0) == 1s);
  CHECK(HeapTrimmer::pause_after(2ms, 400'000'000) == 26s);
}

TEST(nothing_is_due_before_something_was_used) {
  HeapTrimmer heap;
  CHECK(heap.due().is_never());
  heap.used();
  CHECK(!heap.due().is_never() && !heap.due().expired());
}

}  // namespace farandole::check
