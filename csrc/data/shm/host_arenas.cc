// SPDX-License-Identifier: Apache-2.0
#include "data/shm/host_arenas.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/logging.h"

namespace farandole {

HostArenas::HostArenas(std::shared_ptr<Arena> own, int own_rank, std::vector<Fd> fds,
                       ArenaDirectory directory)
    : own_(std::move(own)), own_rank_(own_rank), directory_(directory), peers_(fds.size()) {
  for (size_t i = 0; i < fds.size(); ++i) peers_[i].fd = std::move(fds[i]);
}

void HostArenas::look_around(const std::vector<int>& ranks) {
  for (int rank : ranks) {
    Peer& peer = peers_[static_cast<size_t>(rank)];
    if (rank == own_rank_ || !peer.fd || !directory_.is_announced(rank)) continue;
    const Fd fd = std::move(peer.fd);  // one attempt only
    try {
      peer.mapping = map_arena(fd.get(), /*inherit=*/false);
      directory_.set_mapped(own_rank_, rank);
    } catch (const Error& error) {
      log(LogLevel::kWarning, "farandole copies the arrays of local rank " + std::to_string(rank) +
                                  " instead of sharing them: " + error.what());
    }
  }
}

std::optional<uint64_t> HostArenas::offset_of(const std::byte* memory,
                                              const std::vector<int>& ranks) {
  const std::optional<uint64_t> offset = own_->offset_of(memory);
  if (!offset) return std::nullopt;
  if (!directory_.is_announced(own_rank_)) directory_.announce(own_rank_);
  const bool reached = std::all_of(ranks.begin(), ranks.end(), [this](int rank) {
    return directory_.is_mapped(rank, own_rank_);
  });
  return reached ? offset : std::nullopt;
}

void HostArenas::catch_up(std::byte* memory, uint64_t offset, size_t bytes) const {
  if (has_retired_ && !own_->offset_of(memory)) own_->read_old(offset, memory, bytes);
}

void HostArenas::retire(const std::byte* memory) noexcept {
  has_retired_ = true;
  try {
    own_->retire(memory);
  } catch (const std::exception& error) {
    log(LogLevel::kError,
        std::string("other ranks may still write to an array of a failed call: ") + error.what());
  }
}

}  // namespace farandole
