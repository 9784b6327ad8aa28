// SPDX-License-Identifier: Apache-2.0
// A ring of records in shared memory with one writer and one reader, in two processes. Neither blocks, and either may
// die at any time: a record is seen whole or not at all.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace farandole {

using Bytes = std::span<const std::byte>;

// Zeroed memory is an empty ring. Positions count bytes since the start, and never wrap.
struct RingHeader {
  alignas(64) std::atomic<uint64_t> head;         // published; stored by the writer
  alignas(64) std::atomic<uint64_t> tail;         // consumed; stored by the reader
  alignas(64) std::atomic<uint32_t> room_wanted;  // set by the writer, cleared by the reader
};
static_assert(std::is_standard_layout_v<RingHeader> && sizeof(RingHeader) == 192);

// A ring's memory. The capacity is agreed elsewhere, because values that a peer can write are not trusted.
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

  // Pushes one record of 1 to max_record() bytes by a seq_cst store; then notify the reader. False: no room.
  bool try_push(Bytes first, Bytes second = {});

  // After a failed try_push(): asks the reader to report when half of the ring is free. Then try_push() again.
  void want_room() { header_->room_wanted.store(1); }
  // True if the reader has reported since. Any thread of the writer's process.
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

  // Returns the oldest record in place, 8-byte aligned, until pop(); empty if none. Throws if the ring is corrupt.
  Bytes front();

  // Drops the record that front() returned. True: the writer waits for room and should be notified.
  bool pop();

 private:
  uint64_t tail_;
  size_t front_bytes_ = 0;  // size of front()'s record with its prefix; 0: none
};

}  // namespace farandole
