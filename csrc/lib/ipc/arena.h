// SPDX-License-Identifier: Apache-2.0
// Memory for arrays that the host's other ranks can map. An arena is a sparse memfd: only its allocations take pages. A
// peer maps the arena once, and then also sees later allocations.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "lib/os/fd.h"
#include "lib/os/memory.h"

namespace farandole {

// Maps an arena. Only allocated pages take memory. If `inherit`, forked children keep the mapping. Throws
// Error(kLibrary).
Mapping map_arena(int fd, bool inherit);

class Arena {
 public:
  // Returns the size of the machine's memory, but at most 256 GiB, so that a process can map hundreds of arenas.
  static size_t default_bytes();

  // An arena takes no memory or address space before the first allocation.
  explicit Arena(size_t bytes = default_bytes());

  // Returns zeroed, resident memory that consists of whole pages. Throws Error(kLibrary) if memory is short, so later
  // accesses cannot raise SIGBUS.
  std::byte* allocate(size_t bytes);
  // Frees the pages immediately, in all processes. Returns false if no allocation of this arena starts at `memory`.
  bool release(std::byte* memory);
  // Returns the offset in the memfd of `memory` (anywhere in an allocation), or nullopt if peers do not share it.
  std::optional<uint64_t> offset_of(const std::byte* memory) const;
  // Stops sharing the allocation that contains `memory`: copies its content to private pages. Peers keep the old pages.
  // Other threads may continue to use the memory during the call.
  void retire(const std::byte* memory);
  // Reads from the old pages of a retired allocation, at most 2 GiB. Peers may have written to these pages since
  // retire(). Throws Error(kLibrary).
  void read_old(uint64_t offset, std::byte* into, size_t bytes) const;
  bool has_retired() const;
  bool empty() const;
  bool in_use() const { return in_use_; }  // true after the first allocation
  // Frees the old pages that retire() left to peers. Call this when all peers have ended or left.
  void forget_peers();

  int fd() const { return fd_.get(); }  // to send to peers; the arena still owns it
  size_t bytes() const { return bytes_; }

  // Call these around fork(), so that the child has consistent tables. See farandole_allocate().
  void before_fork() { mutex_.lock(); }
  void after_fork_in_parent() { mutex_.unlock(); }
  void after_fork_in_child();

 private:
  struct Allocation {
    size_t bytes;
    bool retired = false;
    bool released = false;  // released after it was retired, so its offsets must not be reused
  };
  using Allocations = std::map<uint64_t, Allocation>;

  uint64_t take(size_t bytes, size_t alignment);
  void give_back(uint64_t offset, size_t bytes);
  void fill(uint64_t offset, size_t bytes);
  void make_private(uint64_t offset, size_t bytes);
  Allocations::const_iterator around(const std::byte* memory) const;

  const size_t bytes_;
  Fd fd_;
  std::atomic<bool> in_use_{false};
  mutable std::mutex mutex_;
  Mapping mapping_;
  std::map<uint64_t, size_t> free_;  // offset -> bytes; adjacent ranges are merged
  Allocations allocations_;
};

// A process's arenas. They outlive jobs, because arrays do. All functions may be called from any thread.
class ArenaPool {
 public:
  explicit ArenaPool(size_t arena_bytes = Arena::default_bytes());

  std::byte* allocate(size_t bytes);
  void release(std::byte* memory);
  // Returns the arena for a new job: a new arena if peers of an earlier job may still write to the last arena.
  std::shared_ptr<Arena> share();

  void before_fork();
  void after_fork_in_parent();
  void after_fork_in_child();

 private:
  std::mutex mutex_;
  const size_t arena_bytes_;
  std::vector<std::shared_ptr<Arena>> arenas_;  // the last arena takes new allocations
};

}  // namespace farandole
