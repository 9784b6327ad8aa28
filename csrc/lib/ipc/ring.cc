// SPDX-License-Identifier: Apache-2.0
#include "lib/ipc/ring.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"

namespace farandole {
namespace {

// Precedes each record. The complement reveals that a faulty peer has overwritten the prefix.
struct Prefix {
  uint32_t length;
  uint32_t complement;
};

constexpr size_t kAlignment = 8;
constexpr size_t kSmallestCapacity = 64;
// As the length in a prefix, this value means that the next record is at the start of the ring.
constexpr uint32_t kWrap = ~uint32_t{0};
static_assert(sizeof(Prefix) == kAlignment);

constexpr size_t with_prefix(size_t record) {
  return sizeof(Prefix) + (record + kAlignment - 1) / kAlignment * kAlignment;
}

void write_prefix(std::byte* to, uint32_t length) {
  const Prefix prefix{length, ~length};
  std::memcpy(to, &prefix, sizeof(prefix));
}

[[noreturn]] void throw_corrupt(const char* what, uint64_t value) {
  throw Error(ErrorCode::kInternal, std::string("corrupt ring in shared memory: ") + what + " " +
                                        std::to_string(value) + "; a peer has overwritten it");
}

uint32_t read_length(const std::byte* from) {
  Prefix prefix;
  std::memcpy(&prefix, from, sizeof(prefix));
  if (prefix.complement != ~prefix.length) throw_corrupt("prefix", prefix.length);
  return prefix.length;
}

}  // namespace

RingMemory::RingMemory(std::byte* memory, size_t capacity)
    : header_(reinterpret_cast<RingHeader*>(memory)),
      data_(memory + sizeof(RingHeader)),
      capacity_(capacity) {
  const bool aligned = reinterpret_cast<uintptr_t>(memory) % alignof(RingHeader) == 0;
  if (!aligned || capacity < kSmallestCapacity || !std::has_single_bit(capacity)) {
    throw Error(ErrorCode::kInternal,
                "a ring needs aligned memory; its size must be a power of two, at least 64, not " +
                    std::to_string(capacity));
  }
}

RingWriter::RingWriter(std::byte* memory, size_t capacity)
    : RingMemory(memory, capacity), head_(header_->head.load()), known_tail_(header_->tail.load()) {
  if (head_ % kAlignment != 0 || head_ - known_tail_ > capacity) throw_corrupt("head", head_);
}

bool RingWriter::try_push(Bytes first, Bytes second) {
  const size_t length = first.size() + second.size();
  if (length == 0 || length > max_record()) {
    throw Error(ErrorCode::kInternal, "a ring of " + std::to_string(capacity_) +
                                          " bytes cannot take a record of " +
                                          std::to_string(length));
  }
  const size_t needed = with_prefix(length);
  const size_t skipped = needed > until_wrap(head_) ? until_wrap(head_) : 0;
  if (!has_room(skipped + needed)) return false;
  if (skipped > 0) write_prefix(at(head_), kWrap);
  std::byte* to = at(head_ + skipped);
  write_prefix(to, static_cast<uint32_t>(length));
  to += sizeof(Prefix);
  if (!first.empty()) std::memcpy(to, first.data(), first.size());
  if (!second.empty()) std::memcpy(to + first.size(), second.data(), second.size());
  head_ += skipped + needed;
  header_->head.store(head_);
  return true;
}

// Loads the tail, which is in the reader's cache line, only if the known room is not enough.
bool RingWriter::has_room(size_t bytes) {
  if (capacity_ - (head_ - known_tail_) >= bytes) return true;
  const uint64_t tail = header_->tail.load();
  if (head_ - tail > head_ - known_tail_) throw_corrupt("tail", tail);
  known_tail_ = tail;
  return capacity_ - (head_ - known_tail_) >= bytes;
}

RingReader::RingReader(std::byte* memory, size_t capacity)
    : RingMemory(memory, capacity), tail_(header_->tail.load()) {
  if (tail_ % kAlignment != 0) throw_corrupt("tail", tail_);
}

Bytes RingReader::front() {
  uint64_t ready = header_->head.load() - tail_;
  if (ready > capacity_ || ready % kAlignment != 0) throw_corrupt("head", tail_ + ready);
  if (ready == 0) return {};
  uint32_t length = read_length(at(tail_));
  if (length == kWrap) {
    const size_t skipped = until_wrap(tail_);
    if (skipped >= ready) throw_corrupt("wrap at", tail_);
    tail_ += skipped;  // the next pop() stores it
    ready -= skipped;
    length = read_length(at(tail_));
  }
  const uint64_t available = std::min<uint64_t>(ready, until_wrap(tail_));
  if (length == 0 || length > max_record() || with_prefix(length) > available) {
    throw_corrupt("length", length);
  }
  front_bytes_ = with_prefix(length);
  return {at(tail_) + sizeof(Prefix), length};
}

bool RingReader::pop() {
  if (front_bytes_ == 0) throw Error(ErrorCode::kInternal, "pop() was called without front()");
  tail_ += std::exchange(front_bytes_, 0);
  header_->tail.store(tail_);
  // Reports room only when half of the ring is free, so that the writer does not wake up for every record.
  const uint64_t used = header_->head.load() - tail_;
  if (used > capacity_ / 2) return false;
  return header_->room_wanted.load() != 0 && header_->room_wanted.exchange(0) != 0;
}

}  // namespace farandole
