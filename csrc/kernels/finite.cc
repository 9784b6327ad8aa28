// SPDX-License-Identifier: Apache-2.0
#include "kernels/finite.h"

#include <algorithm>
#include <cstdint>

namespace farandole::kernels {
namespace {

constexpr size_t kBlock = 2048;  // elements looked at together

// An exponent of ones alone is NaN or infinity: one more carries into the sign. Integer arithmetic only,
// which compilers turn into vectors for every instruction set.
template <class Word, Word kExponent>
size_t search(const void* data, size_t elements) {
  constexpr Word kLowest = kExponent & static_cast<Word>(~kExponent + 1);
  constexpr Word kSign = static_cast<Word>(Word{1} << (8 * sizeof(Word) - 1));
  const auto* words = static_cast<const Word*>(data);
  for (size_t begin = 0; begin < elements; begin += kBlock) {
    const size_t end = std::min(begin + kBlock, elements);
    Word carries = 0;
    for (size_t i = begin; i < end; ++i) {
      carries = static_cast<Word>(carries | static_cast<Word>((words[i] & kExponent) + kLowest));
    }
    if ((carries & kSign) == 0) continue;
    for (size_t i = begin; i < end; ++i) {
      if ((words[i] & kExponent) == kExponent) return i;
    }
  }
  return elements;
}

}  // namespace

size_t first_not_finite(DType dtype, const void* data, size_t elements) {
  constexpr uint32_t kSingle = 0x7f800000;
  constexpr uint64_t kDouble = 0x7ff0000000000000;
  switch (dtype) {
    case DType::kFloat16: return search<uint16_t, 0x7c00>(data, elements);
    case DType::kBFloat16: return search<uint16_t, 0x7f80>(data, elements);
    case DType::kFloat32: return search<uint32_t, kSingle>(data, elements);
    case DType::kFloat64: return search<uint64_t, kDouble>(data, elements);
    case DType::kComplex64: return search<uint32_t, kSingle>(data, 2 * elements) / 2;
    case DType::kComplex128: return search<uint64_t, kDouble>(data, 2 * elements) / 2;
    default: return elements;
  }
}

}  // namespace farandole::kernels
