// SPDX-License-Identifier: Apache-2.0
// The arenas of a host as one rank sees them: its own, which others map on demand, and theirs. Ranks are
// local ones here. The driver only, but for mapped_bytes().
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

// Who has memory to share, and who maps whose: flags in shared memory, each written by one rank, set once.
// Zeroed memory is valid.
class ArenaDirectory {
 public:
  ArenaDirectory(std::byte* memory, int ranks)
      : flags_(reinterpret_cast<Flag*>(memory)), ranks_(ranks) {}
  static size_t bytes_needed(int ranks) {
    return static_cast<size_t>(ranks) * static_cast<size_t>(ranks) * sizeof(Flag);
  }

  // The owner counts as its own first peer.
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
  // fds: of every local rank's arena; own included, unused.
  HostArenas(std::shared_ptr<Arena> own, int own_rank, std::vector<Fd> fds,
             ArenaDirectory directory);

  // Whether this rank has allocated anything there yet.
  bool has_own() const { return own_->in_use(); }
  // Maps the arenas that `ranks` have announced since. One that cannot be mapped is left alone: its owner
  // stages its data, for ever.
  void look_around(const std::vector<int>& ranks);
  // Where `ranks` find `memory` of this rank; nullopt: they do not, or not yet.
  std::optional<uint64_t> offset_of(const std::byte* memory, const std::vector<int>& ranks);
  // Memory of another rank, at an offset that it has told.
  std::byte* at(int rank, uint64_t offset) const {
    return peers_[static_cast<size_t>(rank)].mapping.data() + offset;
  }
  // As Arena::retire; where even that fails, the log says so.
  void retire(const std::byte* memory) noexcept;
  // Peers have written to own memory at an offset that they were told; brings it here if the memory around
  // it has been retired meanwhile, for another set's bucket.
  void catch_up(std::byte* memory, uint64_t offset, size_t bytes) const;

  // Own bytes that peers have read or written in place. Any thread.
  uint64_t mapped_bytes() const { return mapped_bytes_.load(std::memory_order_relaxed); }
  void count(size_t bytes) { mapped_bytes_.fetch_add(bytes, std::memory_order_relaxed); }

 private:
  struct Peer {
    Fd fd;  // until it is mapped
    ArenaMapping mapping;
  };

  const std::shared_ptr<Arena> own_;
  const int own_rank_;
  ArenaDirectory directory_;
  std::vector<Peer> peers_;
  bool has_retired_ = false;
  std::atomic<uint64_t> mapped_bytes_{0};
};

}  // namespace farandole
