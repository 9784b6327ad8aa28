// SPDX-License-Identifier: Apache-2.0
// A ring of records in shared memory with one writer and one reader, in two processes. Neither ever
// blocks, and either may die anywhere: a record is seen whole or not at all.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <type_traits>
#include <vector>

namespace farandole {

using Bytes = std::span<const std::byte>;

// Zeroed memory is an empty ring. Positions count bytes since the start and never wrap.
struct RingHeader {
  alignas(64) std::atomic<uint64_t> head;         // published; the writer's
  alignas(64) std::atomic<uint64_t> tail;         // consumed; the reader's
  alignas(64) std::atomic<uint32_t> room_wanted;  // the writer sets it, the reader takes it
};
static_assert(std::is_standard_layout_v<RingHeader> && sizeof(RingHeader) == 192);

// Where a ring lies. The capacity is agreed outside: what a peer can write is never trusted.
class RingMemory {
 public:
  // `capacity` is a power of two, at least 64; `memory` is 64-byte aligned, bytes(capacity) long.
  RingMemory(std::byte* memory, size_t capacity);
  static constexpr size_t bytes(size_t capacity) { return sizeof(RingHeader) + capacity; }

  size_t capacity() const { return capacity_; }
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

  // One record of 1 to max_record() bytes, `first` then `second`; false: no room now. Then notify the
  // reader: the publishing store is seq_cst.
  bool try_push(Bytes first, Bytes second = {});

  // No room: the reader shall say when half of the ring is free. Call, then try_push again.
  void want_room() { header_->room_wanted.store(1); }
  // Whether the reader has said so since. Any thread of the writer's process.
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

  // The oldest record, in place until pop(), 8-byte aligned; empty: none. Throws if the ring is corrupt.
  Bytes front();

  // After front(). True: the writer waits for the room that there is now, notify it.
  bool pop();

 private:
  uint64_t tail_;
  size_t front_bytes_ = 0;  // of the record that front() gave, with prefix; 0: none
};

// Never refuses a record: what finds no room waits, in order, in private memory.
class QueuedWriter {
 public:
  explicit QueuedWriter(RingWriter ring) : ring_(ring) {}

  void push(Bytes first, Bytes second = {});

  // Moves what fits; true: nothing is left. When false, call again when room_granted().
  bool flush();

  size_t pending() const { return queue_.size(); }  // records
  bool room_granted() const { return ring_.room_granted(); }
  size_t max_record() const { return ring_.max_record(); }

 private:
  bool flush_once();

  RingWriter ring_;
  std::deque<std::vector<std::byte>> queue_;
};

}  // namespace farandole
