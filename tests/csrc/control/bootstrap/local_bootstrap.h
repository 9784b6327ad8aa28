// SPDX-License-Identifier: Apache-2.0
// Where ranks of a test meet without farandole.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <limits>
#include <new>
#include <string>
#include <vector>

#include "check.h"
#include "control/bootstrap/peer_info.h"
#include "lib/os/futex.h"

namespace farandole::check {

inline Deadline patience() { return Deadline::in(std::chrono::seconds(60)); }

// Memory that the ranks share apart from farandole: to exchange peer infos, and to tell each other how far they
// are. Made before any fork.
class LocalBootstrap {
 public:
  static constexpr int kMostRanks = 40;

  explicit LocalBootstrap(int ranks) : ranks_(static_cast<uint32_t>(ranks)) {
    CHECK(ranks <= kMostRanks);
    void* memory =
        mmap(nullptr, sizeof(Memory), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    memory_ = new (memory) Memory{};
  }
  ~LocalBootstrap() { munmap(memory_, sizeof(Memory)); }
  LocalBootstrap(const LocalBootstrap&) = delete;
  LocalBootstrap& operator=(const LocalBootstrap&) = delete;

  int ranks() const { return static_cast<int>(ranks_); }

  // Counts of what has happened; `event` is 0 to 31.
  void tell(int event) {
    memory_->events[event].fetch_add(1);
    futex_wake(memory_->events[event], std::numeric_limits<int>::max(), kFutexAnyBit);
  }
  uint32_t told(int event) const { return memory_->events[event].load(); }
  // False: the deadline has passed.
  bool await(int event, uint32_t count, Deadline deadline) {
    for (;;) {
      const uint32_t seen = told(event);
      if (seen >= count) return true;
      if (deadline.expired()) return false;
      futex_wait(memory_->events[event], seen, kFutexAnyBit, deadline);
    }
  }
  void await(int event, uint32_t count) {
    if (!await(event, count, patience())) fail("event " + std::to_string(event) + " never came");
  }
  void barrier() {
    const uint32_t round = memory_->events[kBarrier].fetch_add(1) / ranks_;
    futex_wake(memory_->events[kBarrier], std::numeric_limits<int>::max(), kFutexAnyBit);
    await(kBarrier, (round + 1) * ranks_);
  }

  std::vector<PeerInfo> exchange(int rank, uint64_t round, const ByteString& peer_info) {
    auto& slots = memory_->peer_infos[round % 2];
    CHECK(peer_info.size() <= sizeof slots[0].bytes);
    slots[rank].size = peer_info.size();
    std::memcpy(slots[rank].bytes, peer_info.data(), peer_info.size());
    barrier();
    std::vector<PeerInfo> peer_infos;
    for (int r = 0; r < ranks(); ++r)
      peer_infos.push_back(PeerInfo::decode({slots[r].bytes, slots[r].size}));
    return peer_infos;
  }

  // When each rank saw what the test is about.
  std::atomic<int64_t>& time_of(int rank) { return memory_->times[rank]; }

 private:
  static constexpr int kBarrier = 32;
  struct Slot {
    size_t size;
    std::byte bytes[4096];
  };
  struct Memory {
    std::atomic<uint32_t> events[33];
    std::atomic<int64_t> times[kMostRanks];
    Slot peer_infos[2][kMostRanks];
  };
  const uint32_t ranks_;
  Memory* memory_;
};

}  // namespace farandole::check
