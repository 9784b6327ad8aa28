// SPDX-License-Identifier: Apache-2.0
#include "runtime/heap_trimmer.h"

#include <malloc.h>

#include <algorithm>

#include "lib/os/memory.h"

namespace farandole {

std::chrono::nanoseconds HeapTrimmer::pause_after(std::chrono::nanoseconds took, size_t gave_back) {
  constexpr size_t kBytesFaultedInPerNs = 4;
  return 1000 * (took + std::chrono::nanoseconds(gave_back / kBytesFaultedInPerNs));
}

void HeapTrimmer::trim() {
  if (!due().expired()) return;
  used_ = false;
  const size_t before = resident_bytes();
  const int64_t began = now_ns();
  malloc_trim(0);
  const int64_t now = now_ns();
  const size_t after = resident_bytes();
  const int64_t pause =
      pause_after(std::chrono::nanoseconds(now - began), before - std::min(before, after)).count();
  due_ns_ = now + pause + kInterval.count() - (epoch_ns() + pause) % kInterval.count();
}

}  // namespace farandole
