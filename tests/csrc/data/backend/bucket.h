// SPDX-License-Identifier: Apache-2.0
// Buckets with rank-dependent data, and what each member must find in its outputs, byte by byte.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "check.h"
#include "data/backend/backend.h"
#include "kernels/kernels.h"
#include "kernels/kernels_reference.h"
#include "lib/ipc/arena.h"
#include "random.h"

namespace farandole::check {

using Bytes = std::vector<std::byte>;

// One part as all members know it; `part.signature.shape` is everybody's, buffers are empty.
struct PartSpec {
  Part part;
  uint64_t seed = 0;
  bool in_place = false;
  bool whole = false;              // small whole numbers: every order of sums gives the same bits
  std::vector<bool> drops_output;  // by member; empty: nobody
  std::vector<int> host;           // by member; empty: all share one

  size_t element() const { return size_of(part.signature.dtype); }
  size_t row_bytes() const {
    return static_cast<size_t>(part.signature.row_elements()) * element();
  }
  size_t rows(size_t index) const { return static_cast<size_t>(part.rows.at(index)); }
};

using BucketSpec = std::vector<PartSpec>;

// What `member` puts in, for a set of `members`.
inline size_t input_bytes(const PartSpec& spec, int member, int members) {
  if (!spec.part.has(member)) return 0;
  const auto m = static_cast<size_t>(member);
  const auto n = static_cast<size_t>(members);
  size_t rows = 0;
  switch (spec.part.signature.op) {
    case Op::kAllgather: return spec.rows(m) * spec.row_bytes();
    case Op::kAlltoall:
      for (size_t to = 0; to < n; ++to) rows += spec.rows(m * n + to);
      return rows * spec.row_bytes();
    case Op::kScatter:
      for (size_t to = 0; spec.part.signature.root == member && to < n; ++to) rows += spec.rows(to);
      return rows * spec.row_bytes();
    default: return spec.part.signature.bytes();
  }
}

inline size_t output_bytes(const PartSpec& spec, int member, int members) {
  const auto m = static_cast<size_t>(member);
  const auto n = static_cast<size_t>(members);
  size_t rows = 0;
  switch (spec.part.signature.op) {
    case Op::kAllgather:
      for (size_t from = 0; from < n; ++from) rows += spec.rows(from);
      return rows * spec.row_bytes();
    case Op::kAlltoall:
      for (size_t from = 0; from < n; ++from) rows += spec.rows(from * n + m);
      return rows * spec.row_bytes();
    case Op::kScatter:
    case Op::kReducescatter: return spec.rows(m) * spec.row_bytes();
    default: return spec.part.signature.bytes();
  }
}

// Any bits for integers; finite numbers of any size for floats, so that a wrong order of sums shows.
inline Bytes random_values(DType dtype, size_t bytes, uint64_t seed) {
  Random random(seed);
  Bytes values(bytes);
  for (size_t at = 0; at < bytes; at += sizeof(uint64_t)) {
    const uint64_t word = random.next();
    std::memcpy(values.data() + at, &word, std::min(sizeof word, bytes - at));
  }
  const auto clear_bit = [&](size_t step, size_t byte,
                             int mask) {  // never all ones in the exponent
    for (size_t at = byte; at < bytes; at += step) values[at] &= static_cast<std::byte>(~mask);
  };
  switch (dtype) {
    case DType::kBool: clear_bit(1, 0, 0xfe); break;
    case DType::kFloat8E4M3FN:
    case DType::kFloat8E5M2: clear_bit(1, 0, 0x40); break;
    case DType::kFloat16: clear_bit(2, 1, 0x40); break;
    case DType::kBFloat16: clear_bit(2, 1, 0x40); break;
    case DType::kFloat32:
    case DType::kComplex64: clear_bit(4, 3, 0x40); break;
    case DType::kFloat64:
    case DType::kComplex128: clear_bit(8, 7, 0x40); break;
    default: break;
  }
  return values;
}

// Floats that stay exact when four of them are added or multiplied, halved and divided by three.
template <class Format>
Bytes whole_numbers(ReduceOp op, size_t bytes, uint64_t seed) {
  Random random(seed);
  reference::Bytes values(bytes);
  for (size_t i = 0; i < bytes / sizeof(typename Format::Stored); ++i) {
    const int whole = op == ReduceOp::kProduct ? 1 << random.below(2) : 12 * random.between(0, 3);
    reference::put(values, i,
                   Format::encode(static_cast<float>(random.chance(0.5) ? whole : -whole)));
  }
  const auto* begin = reinterpret_cast<const std::byte*>(values.data());
  return Bytes(begin, begin + bytes);
}

inline Bytes input_of(const PartSpec& spec, int member, int members) {
  const DType dtype = spec.part.signature.dtype;
  const ReduceOp op = spec.part.signature.reduce_op;
  const size_t bytes = input_bytes(spec, member, members);
  const uint64_t seed = spec.seed + static_cast<uint64_t>(member);
  using namespace reference;
  if (spec.whole) {
    switch (dtype) {
      case DType::kFloat16: return whole_numbers<SmallFloat<10, -14>>(op, bytes, seed);
      case DType::kBFloat16: return whole_numbers<SmallFloat<7, -126>>(op, bytes, seed);
      case DType::kFloat8E4M3FN: return whole_numbers<reference::Float8E4M3FN>(op, bytes, seed);
      case DType::kFloat8E5M2: return whole_numbers<reference::Float8E5M2>(op, bytes, seed);
      case DType::kFloat32:
      case DType::kComplex64: return whole_numbers<NativeFloat<float>>(op, bytes, seed);
      case DType::kFloat64:
      case DType::kComplex128: return whole_numbers<NativeFloat<double>>(op, bytes, seed);
      default: break;
    }
  }
  return random_values(dtype, bytes, seed);
}

inline std::vector<const void*> pointers_to(const std::vector<Bytes>& buffers) {
  std::vector<const void*> pointers;
  for (const Bytes& buffer : buffers) pointers.push_back(buffer.data());
  return pointers;
}

// The definition of a reduction: all inputs whole, in member order, in one call; on several hosts, in
// the order of their lowest members, of what each host's inputs come to.
inline Bytes reduced(const PartSpec& spec, int members) {
  const Signature& signature = spec.part.signature;
  const DType dtype = signature.dtype;
  const ReduceOp op = signature.reduce_op;
  Bytes result(signature.bytes());
  const size_t count = result.size() / size_of(dtype);
  const kernels::Factors factors = {signature.prescale, signature.postscale,
                                    op == ReduceOp::kAverage ? spec.part.divisor : 1};
  std::vector<std::vector<Bytes>> hosts(static_cast<size_t>(members));
  for (int member = 0; member < members; ++member) {
    const size_t host = spec.host.empty() ? 0 : static_cast<size_t>(spec.host.at(member));
    if (spec.part.has(member)) hosts[host].push_back(input_of(spec, member, members));
  }
  std::vector<Bytes> partials;
  for (const std::vector<Bytes>& inputs : hosts) {
    if (inputs.empty()) continue;
    const int n = static_cast<int>(inputs.size());
    if (spec.host.empty()) {
      kernels::reduce(dtype, op, result.data(), pointers_to(inputs).data(), n, count, factors);
      return result;
    }
    partials.emplace_back(count * size_of(kernels::partial_dtype(dtype, op, factors)));
    kernels::reduce_to_partial(dtype, op, partials.back().data(), pointers_to(inputs).data(), n,
                               count, factors);
  }
  kernels::reduce_partials(dtype, op, result.data(), pointers_to(partials).data(),
                           static_cast<int>(partials.size()), count, factors);
  return result;
}

inline Bytes expected_output(const PartSpec& spec, int member, int members) {
  const auto m = static_cast<size_t>(member);
  const auto n = static_cast<size_t>(members);
  Bytes result;
  const auto append = [&](const Bytes& from, size_t begin, size_t bytes) {
    const auto first = from.begin() + static_cast<ptrdiff_t>(begin);
    result.insert(result.end(), first, first + static_cast<ptrdiff_t>(bytes));
  };
  switch (spec.part.signature.op) {
    case Op::kAllreduce:
    case Op::kReduce: return reduced(spec, members);
    case Op::kBroadcast: return input_of(spec, spec.part.signature.root, members);
    case Op::kReducescatter: {
      size_t before = 0;
      for (size_t other = 0; other < m; ++other) before += spec.rows(other);
      append(reduced(spec, members), before * spec.row_bytes(), spec.rows(m) * spec.row_bytes());
      return result;
    }
    case Op::kAllgather:
      for (int from = 0; from < members; ++from) {
        append(input_of(spec, from, members), 0, input_bytes(spec, from, members));
      }
      return result;
    case Op::kScatter: {
      size_t before = 0;
      for (size_t other = 0; other < m; ++other) before += spec.rows(other);
      append(input_of(spec, spec.part.signature.root, members), before * spec.row_bytes(),
             spec.rows(m) * spec.row_bytes());
      return result;
    }
    case Op::kAlltoall:
      for (size_t from = 0; from < n; ++from) {
        size_t before = 0;
        for (size_t to = 0; to < m; ++to) before += spec.rows(from * n + to);
        append(input_of(spec, static_cast<int>(from), members), before * spec.row_bytes(),
               spec.rows(from * n + m) * spec.row_bytes());
      }
      return result;
    default: return result;
  }
}

// Where buffers lie: on the heap, all in an arena, or by chance here or there.
struct Memory {
  Arena* arena = nullptr;
  bool mixed = false;
};

// Bytes of a test, in an allocation of their own.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Bytes& content, Arena* arena) : arena_(arena), heap_(arena ? Bytes() : content) {
    if (arena == nullptr) {
      bytes_ = heap_;
    } else {
      bytes_ = {arena->allocate(content.size()), content.size()};
      std::copy(content.begin(), content.end(), bytes_.begin());
    }
  }
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(arena_, other.arena_);
    std::swap(heap_, other.heap_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Buffer() {
    if (arena_ != nullptr) arena_->release(bytes_.data());
  }

  std::byte* data() const { return bytes_.data(); }
  auto begin() const { return bytes_.begin(); }
  auto end() const { return bytes_.end(); }
  bool operator==(const Bytes& other) const { return std::ranges::equal(bytes_, other); }

 private:
  Arena* arena_ = nullptr;
  Bytes heap_;
  std::span<std::byte> bytes_;
};

// One member's buffers for a bucket, in one allocation each, with a watched margin on both sides.
class MemberBucket {
 public:
  MemberBucket(const BucketSpec& specs, int member, int members, Memory memory = {})
      : specs_(specs),
        member_(member),
        members_(members),
        memory_(memory),
        random_(member + 1),
        buffers_(specs.size()) {
    for (size_t i = 0; i < specs.size(); ++i) parts_.push_back(make(specs[i], buffers_[i]));
  }
  MemberBucket(const MemberBucket&) = delete;
  MemberBucket& operator=(const MemberBucket&) = delete;

  std::span<const Part> parts() const { return parts_; }

  void check() const {
    for (size_t i = 0; i < specs_.size(); ++i) check(specs_[i], buffers_[i]);
  }

 private:
  static constexpr size_t kMargin = 64;
  static constexpr std::byte kUntouched{0xa5};

  struct Buffers {
    Buffer input, output;
    size_t result_at = 0;  // where the result is: in `output`, or in `input` if in place
  };

  static Bytes with_margins(const Bytes& values) {
    Bytes buffer(values.size() + 2 * kMargin, kUntouched);
    std::copy(values.begin(), values.end(), buffer.begin() + kMargin);
    return buffer;
  }

  bool drops(const PartSpec& spec) const {
    return !spec.drops_output.empty() && spec.drops_output[static_cast<size_t>(member_)];
  }

  // In place, the input lies where the result will be: inside it for an allgather, around it for a
  // reducescatter (at its start).
  bool in_place(const PartSpec& spec) const {
    return spec.in_place && spec.part.has(member_) && spec.part.signature.traits().in_place();
  }

  Buffer place(const Bytes& values) {
    const bool shared = !memory_.mixed || random_.below(2) == 0;
    return Buffer(with_margins(values), shared ? memory_.arena : nullptr);
  }

  Part make(const PartSpec& spec, Buffers& buffers) {
    Part part = spec.part;
    const Op op = part.signature.op;
    const bool has_input = part.has(member_) && brings_input(part.signature, member_);
    const Bytes values = input_of(spec, member_, members_);
    Bytes result(output_bytes(spec, member_, members_), kUntouched);
    size_t input_at = 0;
    if (in_place(spec)) {
      if (op == Op::kAllgather) {
        for (int from = 0; from < member_; ++from) input_at += input_bytes(spec, from, members_);
      }
      if (result.size() < input_at + values.size())
        result.resize(input_at + values.size(), kUntouched);
      if (has_input) {
        std::copy(values.begin(), values.end(), result.begin() + static_cast<ptrdiff_t>(input_at));
      }
    }
    buffers.input = place(values);
    buffers.output = place(result);
    Buffer& source = in_place(spec) ? buffers.output : buffers.input;
    part.input = has_input ? source.data() + kMargin + input_at : nullptr;
    const bool dropped = !gets_result(part.signature, member_) || (drops(spec) && !in_place(spec));
    part.output = dropped ? nullptr : buffers.output.data() + kMargin;
    return part;
  }

  void check(const PartSpec& spec, const Buffers& buffers) const {
    CHECK(buffers.input == with_margins(input_of(spec, member_, members_)));
    Bytes expected = expected_output(spec, member_, members_);
    if (in_place(spec) && !gets_result(spec.part.signature, member_)) {
      expected = input_of(spec, member_, members_);
    } else if (!gets_result(spec.part.signature, member_)) {
      std::ranges::fill(expected, kUntouched);
    }
    if (drops(spec) && !in_place(spec)) {
      CHECK(buffers.output == with_margins(Bytes(expected.size(), kUntouched)));
      return;
    }
    const auto result = buffers.output.begin() + kMargin;
    const auto wrong = std::mismatch(expected.begin(), expected.end(), result).first;
    if (wrong != expected.end()) {
      const Signature& signature = spec.part.signature;
      fail(std::string(name_of(signature.op)) + " of " + name_of(signature.dtype) + " by " +
           name_of(signature.reduce_op) + (in_place(spec) ? " in place" : "") + ": byte " +
           std::to_string(wrong - expected.begin()) + " of " + std::to_string(expected.size()) +
           " is wrong at member " + std::to_string(member_) + " of " + std::to_string(members_));
    }
    CHECK(std::all_of(buffers.output.begin(), result, [](std::byte b) { return b == kUntouched; }));
    CHECK(std::all_of(buffers.output.end() - kMargin, buffers.output.end(),
                      [](std::byte b) { return b == kUntouched; }));
    const auto rest = result + static_cast<ptrdiff_t>(expected.size());
    if (!in_place(spec))
      CHECK(std::all_of(rest, buffers.output.end(), [](std::byte b) { return b == kUntouched; }));
  }

  const BucketSpec& specs_;
  const int member_;
  const int members_;
  const Memory memory_;
  Random random_;
  std::vector<Buffers> buffers_;
  std::vector<Part> parts_;
};

}  // namespace farandole::check
