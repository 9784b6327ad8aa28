// SPDX-License-Identifier: Apache-2.0
// The arenas of a host, by local rank: this rank's, which peers map on demand, and theirs. Driver only, unless marked.
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

// Flags in shared memory: arenas in use, and who has mapped them. One rank writes each, once. Zeroed memory is valid.
class ArenaDirectory {
 public:
  ArenaDirectory(std::byte* memory, int ranks)
      : flags_(reinterpret_cast<Flag*>(memory)), ranks_(ranks) {}
  static size_t bytes_needed(int ranks) {
    return static_cast<size_t>(ranks) * static_cast<size_t>(ranks) * sizeof(Flag);
  }

  // announce() sets the owner's flag for its own arena.
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
  // `fds`: of every local rank's arena; this rank's is unused.
  HostArenas(std::shared_ptr<Arena> own, int own_rank, std::vector<Fd> fds,
             ArenaDirectory directory);

  // True if this rank has ever allocated from its arena.
  bool has_own() const { return own_->in_use(); }
  // Maps arenas that `ranks` have announced since the last call. Data in an unmappable arena is always staged.
  void look_around(const std::vector<int>& ranks);
  // Offset of this rank's `memory`; nullopt: not all of `ranks` have mapped it yet.
  std::optional<uint64_t> offset_of(const std::byte* memory, const std::vector<int>& ranks);
  // Another rank's memory at an offset that it has sent.
  std::byte* at(int rank, uint64_t offset) const {
    return peers_[static_cast<size_t>(rank)].mapping.get() + offset;
  }
  // See Arena::retire(); a failure is only logged.
  void retire(const std::byte* memory) noexcept;
  // Peers have written to own memory at `offset`: copies that here if another set's bucket has retired the memory.
  void catch_up(std::byte* memory, uint64_t offset, size_t bytes) const;

  // Bytes of this rank that peers have accessed in place. Any thread.
  uint64_t mapped_bytes() const { return mapped_bytes_.load(std::memory_order_relaxed); }
  void count(size_t bytes) { mapped_bytes_.fetch_add(bytes, std::memory_order_relaxed); }

 private:
  struct Peer {
    Fd fd;  // until it is mapped
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
