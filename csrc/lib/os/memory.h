// SPDX-License-Identifier: Apache-2.0
// How much memory is left, and taking shared memory without the risk of SIGBUS.
#pragma once

#include <cstddef>
#include <cstdint>

namespace farandole {

constexpr size_t kPageBytes = 4096;
constexpr size_t whole_pages(size_t bytes) {
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

// Bytes that this process may still allocate before the kernel starts to end processes: what the host has
// and every control group above the process allows, caches not counted as used.
size_t available_memory();

// A memfd belongs to a tmpfs without a size, so that the kernel would rather end processes than refuse:
// throws kLibrary with the remedy if `bytes` for `label` are more than available.
void refuse_too_much(const char* label, size_t bytes);

// Allocates pages of a memfd now; throws kLibrary with the remedy.
void allocate_pages(int fd, const char* label, uint64_t offset, size_t bytes);

}  // namespace farandole
