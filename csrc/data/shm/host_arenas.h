// SPDX-License-Identifier: Apache-2.0
// The arenas of a host's ranks. A rank maps a peer's arena once the peer has announced it. Used only by the driver,
// unless marked otherwise.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "lib/ipc/arena.h"
#include "lib/os/fd.h"

namespace farandole {

// Flags in shared memory that say which arenas are in use and which ranks have mapped them. Each flag is set once, by
// one rank. Zeroed memory is a valid initial state.
class ArenaDirectory {
 public:
  ArenaDirectory(std::byte* memory, int ranks)
      : flags_(reinterpret_cast<Flag*>(memory)), ranks_(ranks) {}
  static size_t bytes_needed(int ranks) {
    return static_cast<size_t>(ranks) * static_cast<size_t>(ranks) * sizeof(Flag);
  }

  // An owner announces its arena by setting flag(owner, owner).
  void set_mapped(int peer, int owner) { flag(peer, owner).store(1); }
  bool is_mapped(int peer, int owner) const { return flag(peer, owner).load() != 0; }
  void announce(int owner) { set_mapped(owner, owner); }
  bool is_announced(int owner) const { return is_mapped(owner, owner); }

 private:
  using Flag = std::atomic<uint8_t>;
  Flag& flag(int peer, int owner) const { return flags_[owner * ranks_ + peer]; }

  Flag* const flags_;
  const int ranks_;
};

class HostArenas {
 public:
  // `fds` are the descriptors of all local ranks' arenas. This rank's entry is ignored.
  HostArenas(std::shared_ptr<Arena> own, int own_rank, std::vector<Fd> fds,
             ArenaDirectory directory);

  bool has_own() const { return own_->in_use(); }
  // Maps the arenas that `ranks` have announced. If mapping an arena fails, its data is staged instead.
  void look_around(const std::vector<int>& ranks);
  // Returns the offset of `memory` in this rank's arena. Returns nullopt if `memory` is not in the arena, or if some of
  // `ranks` have not mapped the arena.
  std::optional<uint64_t> offset_of(const std::byte* memory, const std::vector<int>& ranks);
  // Returns the memory of another rank at an offset that this other rank has published.
  std::byte* at(int rank, uint64_t offset) const {
    return peers_[static_cast<size_t>(rank)].mapping.get() + offset;
  }
  // Calls Arena::retire(). Logs an error if that fails.
  void retire(const std::byte* memory) noexcept;
  // Call this after peers have written to `memory`, which is at `offset` in the arena. If a bucket of another set has
  // retired that memory, copies the bytes from the old pages.
  void catch_up(std::byte* memory, uint64_t offset, size_t bytes) const;

  // Returns the number of bytes in this rank's memory that peers have accessed in place. May be called from any thread.
  uint64_t mapped_bytes() const { return mapped_bytes_.load(std::memory_order_relaxed); }
  void count(size_t bytes) { mapped_bytes_.fetch_add(bytes, std::memory_order_relaxed); }

 private:
  struct Peer {
    Fd fd;  // open until the arena is mapped
    Mapping mapping;
  };

  const std::shared_ptr<Arena> own_;
  const int own_rank_;
  ArenaDirectory directory_;
  std::vector<Peer> peers_;
  bool has_retired_ = false;
  std::atomic<uint64_t> mapped_bytes_{0};
};

}  // namespace farandole
