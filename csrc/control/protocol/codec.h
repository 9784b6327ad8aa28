// SPDX-License-Identifier: Apache-2.0
// Encodes control messages as little-endian bytes. When decoding, throws Error(kInternal) if a message is malformed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "base/error.h"

namespace farandole {

// A list of request ids, in order, which stores runs of consecutive ids. The log assigns ids in the order in which
// calls are first reported, so most batches have consecutive ids.
class IdRuns {
 public:
  static constexpr size_t kMost = size_t{1} << 16;  // number of ids in one message
  struct Run {
    uint32_t first = 0;
    uint32_t count = 0;
    bool operator==(const Run&) const = default;
  };

  IdRuns() = default;
  IdRuns(std::initializer_list<uint32_t> ids) {
    for (uint32_t id : ids) add(id);
  }

  void add(uint32_t id) { add(Run{id, 1}); }
  void add(Run run) {
    size_ += run.count;
    if (!runs_.empty() && runs_.back().first + runs_.back().count == run.first) {
      runs_.back().count += run.count;
    } else {
      runs_.push_back(run);
    }
  }
  void clear() {
    runs_.clear();
    size_ = 0;
  }
  template <class Visitor>
  void for_each(Visitor&& visit) const {
    for (const Run& run : runs_) {
      for (uint32_t i = 0; i < run.count; ++i) visit(run.first + i);
    }
  }
  bool empty() const { return size_ == 0; }
  bool full() const { return size_ >= kMost; }
  size_t size() const { return size_; }
  const std::vector<Run>& runs() const { return runs_; }
  bool operator==(const IdRuns&) const = default;

 private:
  std::vector<Run> runs_;
  size_t size_ = 0;
};

using ByteString = std::vector<std::byte>;
using ByteView = std::span<const std::byte>;

// Appends bytes to `out`, which is complete only after the Encoder's destructor has run.
class Encoder {
 public:
  explicit Encoder(ByteString& out) : out_(out), used_(out.size()) {}
  ~Encoder() { out_.resize(used_); }
  Encoder(const Encoder&) = delete;
  Encoder& operator=(const Encoder&) = delete;

  template <class T>
    requires std::is_trivially_copyable_v<T>
  void put(const T& value) {
    append(&value, sizeof(T));
  }
  void put(const std::string& text) { put_sized(text.data(), text.size()); }
  void put_bytes(ByteView bytes) { put_sized(bytes.data(), bytes.size()); }
  template <class T>
    requires std::is_arithmetic_v<T>
  void put(const std::vector<T>& values) {
    put_numbers(std::span(values));
  }
  template <class T>
  void put_numbers(std::span<const T> values) {
    put(static_cast<uint32_t>(values.size()));
    append(values.data(), values.size_bytes());
  }

 private:
  void put_sized(const void* data, size_t size) {
    put(static_cast<uint32_t>(size));
    append(data, size);
  }
  void append(const void* data, size_t size) {
    if (out_.size() - used_ < size) out_.resize(used_ + size + kAhead);
    if (size > 0) std::memcpy(out_.data() + used_, data, size);
    used_ += size;
  }
  static constexpr size_t kAhead = 128;  // bytes allocated first; most messages fit
  ByteString& out_;
  size_t used_;
};

class Decoder {
 public:
  explicit Decoder(ByteView in) : in_(in) {}

  template <class T>
    requires std::is_trivially_copyable_v<T>
  T get() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }
  // Reads an enum whose valid values are 0 .. count-1.
  template <class E>
  E get_enum(int32_t count) {
    auto value = get<int32_t>();
    if (value < 0 || value >= count) fail();
    return static_cast<E>(value);
  }
  bool get_bool() {
    auto value = get<uint8_t>();
    if (value > 1) fail();
    return value == 1;
  }
  ByteView get_bytes() { return take(get<uint32_t>()); }
  std::string get_string() {
    ByteView bytes = get_bytes();
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  template <class T>
  std::vector<T> get_vector() {
    ByteView bytes = take(static_cast<size_t>(get<uint32_t>()) * sizeof(T));
    std::vector<T> values(bytes.size() / sizeof(T));
    if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
  // Reads a number of items, each of which takes at least `least` bytes. Fails if `in_` is too short for that many
  // items, so that allocations are bounded.
  uint32_t get_count(size_t least) {
    auto count = get<uint32_t>();
    if (count > in_.size() / least) fail();
    return count;
  }
  bool empty() const { return in_.empty(); }
  void finish() const {
    if (!in_.empty()) fail();
  }

 private:
  ByteView take(size_t size) {
    if (size > in_.size()) fail();
    ByteView head = in_.first(size);
    in_ = in_.subspan(size);
    return head;
  }
  [[noreturn]] static void fail() {
    throw Error(ErrorCode::kInternal, "a control message is malformed");
  }
  ByteView in_;
};

}  // namespace farandole
