// SPDX-License-Identifier: Apache-2.0
// A rank's counters, in memory that every rank of the host may read.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace farandole {

// Counts values by magnitude: slot i holds those with i binary digits, that is below 2^i.
struct Histogram {
  static constexpr size_t kSlots = 48;
  std::atomic<uint64_t> count;
  std::atomic<uint64_t> sum;
  std::atomic<uint64_t> slots[kSlots];

  void add(uint64_t value) {
    const size_t digits = static_cast<size_t>(std::bit_width(value));
    count.fetch_add(1, std::memory_order_relaxed);
    sum.fetch_add(value, std::memory_order_relaxed);
    slots[std::min(digits, kSlots - 1)].fetch_add(1, std::memory_order_relaxed);
  }
};

struct Tally {
  std::atomic<uint64_t> submitted;  // tensors
  std::atomic<uint64_t> done;
  std::atomic<uint64_t> failed;
  std::atomic<uint64_t> bytes;    // of tensors that are done
  std::atomic<uint64_t> buckets;  // moved
  std::atomic<uint64_t> moving_ns;
  std::atomic<uint64_t> audits;  // of blocks
  std::atomic<uint64_t> faults;  // results and messages found to be wrong
  Histogram negotiation_ns;      // submit to log entry
  Histogram wait_ns;             // callers blocked in wait
  Histogram bucket_bytes;
  Histogram bandwidth;  // MB/s: bytes of a bucket by time from launch to done
  // Current state
  std::atomic<uint32_t> waiters;  // threads blocked in wait
  std::atomic<uint32_t> waiting_for;
  std::atomic<int64_t> waiting_since_ns;
  std::atomic<int64_t> moving_since_ns;  // 0: no bucket is moving
};

// How often a rank was the last to submit a tensor, and by how much in total. Written by rank 0.
struct Lateness {
  std::atomic<uint64_t> times;
  std::atomic<uint64_t> ns;
};

}  // namespace farandole
