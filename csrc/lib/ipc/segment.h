// SPDX-License-Identifier: Apache-2.0
// Unnamed shared memory (a memfd). The kernel frees it after all ranks have ended, even if they crash.
#pragma once

#include <cstddef>

#include "lib/os/fd.h"
#include "lib/os/memory.h"

namespace farandole {

struct SegmentSize {
  SegmentSize(size_t all) : SegmentSize(all, all) {}
  SegmentSize(size_t all, size_t first) : bytes(all), at_once(first) {}

  size_t bytes;
  size_t at_once;  // allocated by create(); call allocate_pages() before writing to later bytes
};

class Segment {
 public:
  // Creates zeroed memory. Throws Error(kLibrary) if memory is short, so later accesses cannot raise SIGBUS. `label` is
  // the name shown in /proc/PID/maps. If `inherit` is false, a forked child has no mapping, and must neither use nor
  // destroy the Segment.
  static Segment create(const char* label, SegmentSize size, bool inherit = false);

  // Maps the segment of another rank. Throws if the creator could still shrink the segment.
  static Segment map(Fd fd, bool inherit = false);

  Segment() = default;

  std::byte* data() const { return memory_.get(); }
  size_t size() const { return memory_.get_deleter().bytes; }
  int fd() const { return fd_.get(); }  // to send to peers; the segment still owns it

 private:
  Segment(Fd fd, size_t bytes, bool inherit);

  Fd fd_;
  Mapping memory_;
};

}  // namespace farandole
