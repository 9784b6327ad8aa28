// SPDX-License-Identifier: Apache-2.0
#include "kernels/kernels.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <limits>
#include <string>

#include "base/error.h"

namespace farandole::kernels {
namespace {

struct Candidate {
  const Target* target;
  bool (*runs_here)();
};

// Sorted by preference; the best target is last.
constexpr Candidate kCandidates[] = {
    {&kBaseline, [] { return true; }},
#if defined(__x86_64__)
    {&kAvx2,
     [] { return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("f16c") != 0; }},
    {&kAvx512,
     [] {
       return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
              __builtin_cpu_supports("avx512vl") != 0 && __builtin_cpu_supports("avx512dq") != 0;
     }},
#elif defined(__aarch64__)
    {&kNeon, [] { return true; }},
#endif
};

std::atomic<const Target*> g_target{nullptr};

const Target* best() {
  const Target* found = nullptr;
  for (const Candidate& candidate : kCandidates) {
    if (candidate.runs_here()) found = candidate.target;
  }
  return found;
}

const Target& named(std::string_view name) {
  std::string names;
  for (const Candidate& candidate : kCandidates) {
    if (!candidate.runs_here()) continue;
    if (name == candidate.target->name) return *candidate.target;
    names += std::string(names.empty() ? "" : ", ") + candidate.target->name;
  }
  throw Error(ErrorCode::kInvalidArgument, "CPU target '" + std::string(name) +
                                               "' is unknown or unsupported here; use: " + names);
}

const Target& current() {
  const Target* chosen = g_target.load(std::memory_order_acquire);
  if (chosen == nullptr) {
    select_target("");
    chosen = g_target.load(std::memory_order_acquire);
  }
  return *chosen;
}

static_assert(kRows == kDTypeCount);

bool is_plain(const Factors& factors) {
  return factors.pre == 1.0 && factors.post == 1.0 && factors.divisor == 1;
}

const Row& row_of(const Target& target, DType dtype) {
  return target.rows[static_cast<size_t>(dtype)];
}

// Returns nullptr if the op is not supported.
ReduceFn loop_of(const Target& target, DType dtype, ReduceOp op) {
  const Row& row = row_of(target, dtype);
  switch (op) {
    case ReduceOp::kAverage:
    case ReduceOp::kSum: return row.sum;
    case ReduceOp::kMin: return row.min;
    case ReduceOp::kMax: return row.max;
    case ReduceOp::kProduct: return row.product;
    case ReduceOp::kAdasum: return nullptr;
  }
  return nullptr;
}

[[noreturn]] void refuse(DType dtype, ReduceOp op, const std::string& why) {
  throw Error(ErrorCode::kInvalidArgument,
              std::string("cannot reduce ") + name_of(dtype) + " by " + name_of(op) + why);
}

constexpr size_t kTileBytes = 32 * 1024;  // elements of all inputs, in the wide type

const std::byte* element(const void* base, size_t index, DType dtype) {
  return static_cast<const std::byte*>(base) + index * size_of(dtype);
}
std::byte* element(void* base, size_t index, DType dtype) {
  return static_cast<std::byte*>(base) + index * size_of(dtype);
}

template <class Word>
void fill(void* out, size_t count, uint64_t bits) {
  const auto value = static_cast<Word>(bits);
  for (size_t i = 0; i < count; ++i) {
    std::memcpy(static_cast<char*>(out) + i * sizeof value, &value, sizeof value);
  }
}

}  // namespace

bool supports(DType dtype, ReduceOp op) { return loop_of(kBaseline, dtype, op) != nullptr; }

void reduce(DType dtype, ReduceOp op, void* out, const void* const* inputs, int n_inputs,
            size_t count, const Factors& factors) {
  const ReduceFn loop = loop_of(current(), dtype, op);
  if (loop == nullptr) refuse(dtype, op, "");
  if (n_inputs < 1) refuse(dtype, op, ": no inputs");
  if (factors.divisor < 1 || factors.divisor > std::numeric_limits<int32_t>::max()) {
    refuse(dtype, op, ": the divisor must be from 1 to 2^31 - 1");
  }
  const bool plain = is_plain(factors);
  const DTypeTraits& traits = traits_of(dtype);
  if (!traits.takes_factors() && !plain) refuse(dtype, op, " with a factor");
  if (n_inputs == 1 && plain) {
    if (out != inputs[0]) copy(out, inputs[0], count * size_of(dtype));
    return;
  }
  loop(out, inputs, n_inputs, traits.is_complex() ? 2 * count : count, factors);
}

DType partial_dtype(DType dtype, ReduceOp, const Factors& factors) {
  const DTypeTraits& traits = traits_of(dtype);
  return traits.is_float() || !is_plain(factors) ? traits.carrier : dtype;
}

void reduce_to_partial(DType dtype, ReduceOp op, void* partial, const void* const* inputs,
                       int n_inputs, size_t count, const Factors& factors) {
  const DType wide = partial_dtype(dtype, op, factors);
  if (wide == dtype) {
    return reduce(dtype, op, partial, inputs, n_inputs, count, {factors.pre, 1.0, 1});
  }
  const auto n = static_cast<size_t>(n_inputs);
  const size_t tile = std::max<size_t>(kTileBytes / size_of(wide) / n, 1);
  std::vector<std::byte> widened(tile * n * size_of(wide));
  std::vector<const void*> rows(n);
  for (size_t from = 0; from < count; from += tile) {
    const size_t size = std::min(tile, count - from);
    for (size_t q = 0; q < n; ++q) {
      std::byte* const row = widened.data() + q * tile * size_of(wide);
      row_of(current(), dtype).widen(row, element(inputs[q], from, dtype), size, factors);
      rows[q] = row;
    }
    reduce(wide, op, element(partial, from, wide), rows.data(), n_inputs, size, {});
  }
}

void reduce_partials(DType dtype, ReduceOp op, void* out, const void* const* partials,
                     int n_partials, size_t count, const Factors& factors) {
  const DType wide = partial_dtype(dtype, op, factors);
  if (wide == dtype) {
    const Factors rest = {1.0, factors.post, factors.divisor};
    return reduce(dtype, op, out, partials, n_partials, count, rest);
  }
  const size_t tile = kTileBytes / size_of(wide);
  std::vector<std::byte> result(tile * size_of(wide));
  std::vector<const void*> rows(static_cast<size_t>(n_partials));
  for (size_t from = 0; from < count; from += tile) {
    const size_t size = std::min(tile, count - from);
    for (size_t q = 0; q < rows.size(); ++q) rows[q] = element(partials[q], from, wide);
    reduce(wide, op, result.data(), rows.data(), n_partials, size, {});
    row_of(current(), dtype).narrow(element(out, from, dtype), result.data(), size, factors);
  }
}

void fill_identity(DType dtype, ReduceOp op, void* out, size_t count) {
  if (!supports(dtype, op)) refuse(dtype, op, "");
  const DTypeTraits& traits = traits_of(dtype);
  const auto identity = traits_of(op).identity;
  const uint64_t bits = identity ? traits.*identity : 0;
  const size_t real = size_of(traits.real);
  const size_t numbers = count * (traits.size / real);
  switch (real) {
    case 1: return fill<uint8_t>(out, numbers, bits);
    case 2: return fill<uint16_t>(out, numbers, bits);
    case 4: return fill<uint32_t>(out, numbers, bits);
    default: return fill<uint64_t>(out, numbers, bits);
  }
}

void copy(void* dst, const void* src, size_t bytes) {
  if (bytes > 0) std::memcpy(dst, src, bytes);
}

void select_target(std::string_view name) {
  g_target.store(name.empty() ? best() : &named(name), std::memory_order_release);
}

const char* target() { return current().name; }

std::vector<const char*> targets_available() {
  std::vector<const char*> names;
  for (const Candidate& candidate : kCandidates) {
    if (candidate.runs_here()) names.push_back(candidate.target->name);
  }
  return names;
}

}  // namespace farandole::kernels
