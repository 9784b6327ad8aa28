// SPDX-License-Identifier: Apache-2.0
// Memory for arrays that the other ranks of the host can map: one sparse memfd whose pages come and go with
// allocations. A peer maps it once and then sees whatever is allocated later.
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

// A whole arena mapped into one process. Only allocated pages cost memory. With `inherit`, forked children keep the
// mapping. Throws kLibrary.
Mapping map_arena(int fd, bool inherit);

// One arena. Any thread.
class Arena {
 public:
  // As large as the machine's memory, but at most 256 GiB, so that a process can map hundreds.
  static size_t default_bytes();

  // Takes neither memory nor, before the first allocation, address space.
  explicit Arena(size_t bytes = default_bytes());

  // Zeroed whole pages, already resident: too little memory is an Error(kLibrary) here, not a SIGBUS later.
  std::byte* allocate(size_t bytes);
  // Frees the pages at once, for all processes. False: `memory` does not begin an allocation of this arena.
  bool release(std::byte* memory);
  // Offset of `memory` in the memfd, for peers; it may lie inside an allocation. nullopt: not shared.
  std::optional<uint64_t> offset_of(const std::byte* memory) const;
  // Stops sharing the allocation around `memory`: its content stays, copied to private pages, while peers
  // keep the old pages and what they hold. Other threads may use the memory meanwhile.
  void retire(const std::byte* memory);
  // Reads, at `offset` of the old pages, what peers wrote there after retire(). Throws kLibrary.
  void read_old(uint64_t offset, std::byte* into, size_t bytes) const;
  bool has_retired() const;
  bool empty() const;
  bool in_use() const { return in_use_; }  // at least one allocation was ever made
  // Call when no peer is left: frees the old pages that retire() left to peers.
  void forget_peers();

  int fd() const { return fd_.get(); }  // to send to peers; stays owned here
  size_t bytes() const { return bytes_; }

  // Call around fork(), so that the child finds consistent tables. The child sees the parent's memory until
  // it writes to it; the parent never sees the child's writes.
  void before_fork() { mutex_.lock(); }
  void after_fork_in_parent() { mutex_.unlock(); }
  void after_fork_in_child();

 private:
  struct Allocation {
    size_t bytes;
    bool retired = false;
    bool released = false;  // only if retired: its offsets are not reused
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
  std::map<uint64_t, size_t> free_;  // offset -> bytes, never adjacent
  Allocations allocations_;
};

// A process's arenas, from which its arrays are allocated. They outlive a job, because arrays do.
class ArenaPool {
 public:
  explicit ArenaPool(size_t arena_bytes = Arena::default_bytes());

  std::byte* allocate(size_t bytes);
  void release(std::byte* memory);
  // The arena for a new job: a fresh one if peers of an earlier job may still write to the last one.
  std::shared_ptr<Arena> share();

  void before_fork();
  void after_fork_in_parent();
  void after_fork_in_child();

 private:
  std::mutex mutex_;
  const size_t arena_bytes_;
  std::vector<std::shared_ptr<Arena>> arenas_;  // the last one takes new allocations
};

}  // namespace farandole
