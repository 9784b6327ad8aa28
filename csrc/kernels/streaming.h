// SPDX-License-Identifier: Apache-2.0
// Copies that leave the cache to others. No std headers here (see codec.h).
#pragma once

#include "kernels/codec.h"

namespace farandole::kernels {

// The caller orders the stores with a fence: other threads may see them late otherwise.
template <class Cpu>
void stream_bytes(void* dst, const void* src, size_t bytes) {
  constexpr size_t kStep = Cpu::kVectorBytes;
  char* to = static_cast<char*>(dst);
  const char* from = static_cast<const char*>(src);
  const size_t to_boundary = -reinterpret_cast<uintptr_t>(to) % kStep;
  size_t at = to_boundary < bytes ? to_boundary : bytes;
  __builtin_memcpy(to, from, at);
  for (; at + kStep <= bytes; at += kStep) {
    typename Words<Cpu>::Bits vector;
    __builtin_memcpy(&vector, from + at, kStep);
    Cpu::stream(to + at, vector);
  }
  __builtin_memcpy(to + at, from + at, bytes - at);
}

}  // namespace farandole::kernels
