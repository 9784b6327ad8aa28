// SPDX-License-Identifier: Apache-2.0
#include "runtime/heap_trimmer.h"

#include <malloc.h>
#include <time.h>

#include <algorithm>

#include "lib/os/memory.h"

namespace farandole {
namespace {

// By the calling thread.
int64_t used_cpu_ns() {
  timespec used;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return int64_t{used.tv_sec} * 1'000'000'000 + used.tv_nsec;
}

}  // namespace

std::chrono::nanoseconds HeapTrimmer::pause_after(std::chrono::nanoseconds took, size_t gave_back) {
  constexpr size_t kBytesFaultedInPerNs = 8;
  return 500 * (took + std::chrono::nanoseconds(gave_back / kBytesFaultedInPerNs));
}

void HeapTrimmer::trim() {
  if (!due().expired()) return;
  used_ = false;
  const size_t before = resident_bytes();
  const int64_t began = used_cpu_ns();
  malloc_trim(0);
  const int64_t took = used_cpu_ns() - began;
  const size_t after = resident_bytes();
  const int64_t pause =
      pause_after(std::chrono::nanoseconds(took), before - std::min(before, after)).count();
  due_ns_ = now_ns() + pause + kInterval.count() - (epoch_ns() + pause) % kInterval.count();
}

}  // namespace farandole
