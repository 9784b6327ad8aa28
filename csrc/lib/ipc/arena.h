// SPDX-License-Identifier: Apache-2.0
// Memory that the other ranks of a host can map: one sparse memfd, whose pages come and go with the
// allocations in it. A peer maps it once, whatever is allocated later.
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

namespace farandole {

// A whole arena in one process's address space: only the pages that are allocated cost memory.
class ArenaMapping {
 public:
  ArenaMapping() = default;
  // Unless `inherit`, a forked child has no mapping. Throws kLibrary.
  ArenaMapping(int fd, bool inherit);
  ArenaMapping(ArenaMapping&& other) noexcept;
  ArenaMapping& operator=(ArenaMapping&& other) noexcept;
  ~ArenaMapping();

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// Any thread.
class Arena {
 public:
  static constexpr size_t kHugePageBytes = size_t{2} << 20;
  // Room for every page of this machine, within bounds that let a process map hundreds of arenas.
  static size_t default_bytes();

  // Reserves numbers only: neither memory nor, before the first allocation, addresses.
  explicit Arena(size_t bytes = default_bytes());

  // Zeroed, of whole pages, resident: short memory is an Error(kLibrary) here, not a SIGBUS later.
  std::byte* allocate(size_t bytes);
  // Gives the pages back at once, in all processes. False: this is not an allocation of the arena.
  bool release(std::byte* memory);
  // Where peers find `memory`, which may lie inside an allocation; nullopt: nowhere.
  std::optional<uint64_t> offset_of(const std::byte* memory) const;
  // Ends the sharing of the allocation around `memory`: its content stays, on private pages, and no peer
  // sees or changes it any more. Other threads may use it meanwhile. The peers keep the old pages as they
  // are: what they still read there is what was there.
  void retire(const std::byte* memory);
  // What a peer has written at `offset` of those old pages since. Throws kLibrary.
  void read_old(uint64_t offset, std::byte* into, size_t bytes) const;
  bool has_retired() const;
  bool empty() const;
  bool in_use() const { return in_use_; }  // there has been an allocation
  // No peer is left: frees the pages that retire() left to them.
  void forget_peers();

  int fd() const { return fd_.get(); }  // to send to peers; stays owned here
  size_t bytes() const { return bytes_; }

  // Around fork(), so that the child finds the tables whole. In it the memory shows what the parent has
  // there, until the child writes to it; the parent never sees that.
  void before_fork() { mutex_.lock(); }
  void after_fork_in_parent() { mutex_.unlock(); }
  void after_fork_in_child();

 private:
  struct Allocation {
    size_t bytes;
    bool retired = false;
    bool released = false;  // and retired: its numbers are not given out again
  };
  using Allocations = std::map<uint64_t, Allocation>;

  uint64_t take(size_t bytes, size_t alignment);
  void give_back(uint64_t offset, size_t bytes);
  void fill(uint64_t offset, size_t bytes);
  void punch(uint64_t offset, size_t bytes);
  void make_private(uint64_t offset, size_t bytes);
  Allocations::const_iterator around(const std::byte* memory) const;

  const size_t bytes_;
  Fd fd_;
  std::atomic<bool> in_use_{false};
  mutable std::mutex mutex_;
  ArenaMapping mapping_;
  std::map<uint64_t, size_t> free_;  // offset -> bytes, never adjacent
  Allocations allocations_;
};

// What a process allocates from, for as long as it lives: arenas outlive a job, because arrays do.
class ArenaPool {
 public:
  explicit ArenaPool(size_t arena_bytes = Arena::default_bytes());

  std::byte* allocate(size_t bytes);
  void release(std::byte* memory);
  // What a new job shares: a fresh arena where an earlier job's peers may still reach into the last one.
  std::shared_ptr<Arena> share();

  void before_fork();
  void after_fork_in_parent();
  void after_fork_in_child();

 private:
  std::mutex mutex_;
  const size_t arena_bytes_;
  std::vector<std::shared_ptr<Arena>> arenas_;  // the last one serves new allocations
};

}  // namespace farandole
