// SPDX-License-Identifier: Apache-2.0
// Shared memory without a name: a memfd, so that a rank that dies in any way leaves nothing behind.
#pragma once

#include <cstddef>

#include "lib/os/fd.h"

namespace farandole {

class Segment {
 public:
  // Creates zeroed memory, already allocated: a full tmpfs or memory limit is an Error here, not a SIGBUS
  // later. `label` shows in /proc/PID/maps. Without `inherit`, a forked child has no mapping and must neither
  // touch nor destroy the Segment.
  static Segment create(const char* label, size_t bytes, bool inherit = false);

  // Maps a segment that another rank created. Throws if its creator could still shrink it.
  static Segment map(Fd fd, bool inherit = false);

  Segment() = default;
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  int fd() const { return fd_.get(); }  // to send to peers; stays owned here

 private:
  Segment(Fd fd, size_t bytes, bool inherit);

  Fd fd_;
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace farandole
