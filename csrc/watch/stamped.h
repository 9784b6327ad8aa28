// SPDX-License-Identifier: Apache-2.0
// A value in shared memory that any thread may write and any process may read without a lock. A stamp detects
// incomplete values, even if the writer died while writing.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>

namespace farandole {

// Zeroed memory is a Stamped that was never written.
template <class T>
class Stamped {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(uint64_t) == 0);
  static constexpr size_t kWords = sizeof(T) / sizeof(uint64_t);

 public:
  struct Seen {
    uint64_t number;
    T value;
  };

  // `number` has to grow. False: another writer is active or has written a later number; nothing is written.
  // Only the first `bytes` of `value` are used.
  bool write(uint64_t number, const T& value, size_t bytes = sizeof(T)) {
    const uint64_t writing = 2 * number + 1;
    uint64_t stamp = stamp_.load(std::memory_order_relaxed);
    if (stamp % 2 == 1 || stamp > writing) return false;
    if (!stamp_.compare_exchange_strong(stamp, writing, std::memory_order_acq_rel)) return false;
    std::array<uint64_t, kWords> words;
    const size_t used = (bytes + sizeof(uint64_t) - 1) / sizeof(uint64_t);
    std::memcpy(words.data(), &value, used * sizeof(uint64_t));
    // Release: whoever reads one of these words then reads a stamp no older than `writing`.
    for (size_t i = 0; i < used; ++i) words_[i].store(words[i], std::memory_order_release);
    stamp_.store(writing + 1, std::memory_order_release);
    return true;
  }

  // nullopt: never written, or being written.
  std::optional<Seen> read() const {
    const uint64_t before = stamp_.load(std::memory_order_acquire);
    if (before == 0 || before % 2 == 1) return std::nullopt;
    std::array<uint64_t, kWords> words;
    for (size_t i = 0; i < kWords; ++i) words[i] = words_[i].load(std::memory_order_acquire);
    if (stamp_.load(std::memory_order_relaxed) != before) return std::nullopt;
    Seen seen{before / 2 - 1, {}};
    std::memcpy(static_cast<void*>(&seen.value), words.data(), sizeof(T));
    return seen;
  }

 private:
  std::atomic<uint64_t> stamp_;  // 2 * number + 1: being written; + 2: complete
  std::atomic<uint64_t> words_[kWords];
};

}  // namespace farandole
