// SPDX-License-Identifier: Apache-2.0
// Searches buffers for NaN and infinity.

#include <algorithm>
#include <cstdint>

#include "kernels/kernels.h"

namespace farandole::kernels {
namespace {

constexpr size_t kBlock = 2048;  // elements per check

// In NaN and infinity, all exponent bits are ones, so adding the lowest exponent bit carries into the sign bit.
// Compilers can vectorise this integer arithmetic for every instruction set.
template <class Word>
size_t search(const void* data, size_t elements, uint64_t exponent_bits) {
  const auto exponent = static_cast<Word>(exponent_bits);
  const auto lowest = static_cast<Word>(exponent & (~exponent_bits + 1));
  constexpr Word kSign = static_cast<Word>(Word{1} << (8 * sizeof(Word) - 1));
  const auto* words = static_cast<const Word*>(data);
  for (size_t begin = 0; begin < elements; begin += kBlock) {
    const size_t end = std::min(begin + kBlock, elements);
    Word carries = 0;
    for (size_t i = begin; i < end; ++i) {
      carries = static_cast<Word>(carries | static_cast<Word>((words[i] & exponent) + lowest));
    }
    if ((carries & kSign) == 0) continue;
    for (size_t i = begin; i < end; ++i) {
      if ((words[i] & exponent) == exponent) return i;
    }
  }
  return elements;
}

}  // namespace

size_t first_not_finite(DType dtype, const void* data, size_t elements) {
  const DTypeTraits& traits = traits_of(dtype);
  if (traits.not_finite == 0) return elements;
  const size_t real = size_of(traits.real), parts = traits.size / real, numbers = parts * elements;
  const auto search_as = [&]<class Word>(Word) {
    return search<Word>(data, numbers, traits.not_finite) / parts;
  };
  switch (real) {
    case 1: return search_as(uint8_t{});
    case 2: return search_as(uint16_t{});
    case 4: return search_as(uint32_t{});
    default: return search_as(uint64_t{});
  }
}

}  // namespace farandole::kernels
