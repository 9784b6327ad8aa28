// SPDX-License-Identifier: Apache-2.0
// A ring of records in shared memory, for one writer and one reader in two processes. Neither blocks. If one of them
// dies, the other still sees whole records only.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace farandole {

using Bytes = std::span<const std::byte>;

// Zeroed memory is an empty ring. Positions are numbers of bytes since the ring was made; they never wrap.
struct RingHeader {
  alignas(64) std::atomic<uint64_t> head;         // end of the records; the writer stores it
  alignas(64) std::atomic<uint64_t> tail;         // first unread record; the reader stores it
  alignas(64) std::atomic<uint32_t> room_wanted;  // the writer sets it, the reader clears it
};
static_assert(std::is_standard_layout_v<RingHeader> && sizeof(RingHeader) == 192);

// A ring's memory. The capacity is not stored there, because a faulty peer could overwrite it.
class RingMemory {
 public:
  // `capacity`: a power of two, at least 64. `memory`: 64-byte aligned, bytes(capacity) long.
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

  // Appends `first` and `second` as one record of 1 to max_record() bytes, by a seq_cst store. The caller must then
  // notify the reader. Returns false if there is no room.
  bool try_push(Bytes first, Bytes second = {});

  // After try_push() failed: asks the reader to report when half of the ring is free. Then call try_push() once more.
  void want_room() { header_->room_wanted.store(1); }
  // True if the reader has reported since want_room(). Any thread of the writer's process.
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

  // Returns the oldest record in place, 8-byte aligned, valid until pop(); empty: none. Throws if the ring is corrupt.
  Bytes front();

  // Drops the record that front() returned. Returns true if the writer waits for room; then notify the writer.
  bool pop();

 private:
  uint64_t tail_;
  size_t front_bytes_ = 0;  // size of front()'s record with its prefix; 0: none
};

}  // namespace farandole
