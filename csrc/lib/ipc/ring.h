// SPDX-License-Identifier: Apache-2.0
// A ring of records in shared memory, for one writer and one reader in two different processes. Neither of them blocks.
// If one of them dies, the other still sees only whole records.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace farandole {

using Bytes = std::span<const std::byte>;

// Zeroed memory is an empty ring. A position is the total number of bytes written since the ring was created. It never
// wraps.
struct RingHeader {
  alignas(64) std::atomic<uint64_t> head;         // end of the records; the writer stores it
  alignas(64) std::atomic<uint64_t> tail;         // first unread record; the reader stores it
  alignas(64) std::atomic<uint32_t> room_wanted;  // the writer sets it, the reader clears it
};
static_assert(std::is_standard_layout_v<RingHeader> && sizeof(RingHeader) == 192);

// The memory of a ring. The capacity is not stored in it, because a faulty peer could overwrite it.
class RingMemory {
 public:
  // `capacity` must be a power of two and at least 64. `memory` must be aligned to 64 bytes and bytes(capacity) long.
  RingMemory(std::byte* memory, size_t capacity);
  static constexpr size_t bytes(size_t capacity) { return sizeof(RingHeader) + capacity; }

  size_t max_record() const { return capacity_ / 4; }

 protected:
  std::byte* at(uint64_t position) const { return data_ + (position & (capacity_ - 1)); }
  size_t until_wrap(uint64_t position) const { return capacity_ - (position & (capacity_ - 1)); }

  RingHeader* header_;
  std::byte* data_;
  size_t capacity_;
};

class RingWriter : public RingMemory {
 public:
  RingWriter(std::byte* memory, size_t capacity);

  // Appends `first` and `second` as one record of 1 to max_record() bytes, with a seq_cst store. The caller must then
  // notify the reader. Returns false if there is no room.
  bool try_push(Bytes first, Bytes second = {});

  // Call this after a failed try_push(), then try once more. Asks the reader to report when half of the ring is free.
  void want_room() { header_->room_wanted.store(1); }
  // True if the reader has reported room since want_room(). May be called from any thread of the writer's process.
  bool room_granted() const { return header_->room_wanted.load() == 0; }

 private:
  bool has_room(size_t bytes);

  uint64_t head_;
  uint64_t known_tail_;
};

class RingReader : public RingMemory {
 public:
  RingReader(std::byte* memory, size_t capacity);

  bool empty() const { return header_->head.load() == tail_; }

  // Returns the oldest record in place, or an empty span if there is none. The record is 8-byte aligned and stays valid
  // until pop(). Throws if the ring is corrupt.
  Bytes front();

  // Drops the record that front() returned. Returns true if the writer waits for room; then notify the writer.
  bool pop();

 private:
  uint64_t tail_;
  size_t front_bytes_ = 0;  // size of front()'s record with its prefix; 0 if there is none
};

}  // namespace farandole
