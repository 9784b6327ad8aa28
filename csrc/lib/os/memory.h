// SPDX-License-Identifier: Apache-2.0
// How much memory is left, and allocating shared memory without risking SIGBUS.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace farandole {

constexpr size_t kPageBytes = 4096;
constexpr size_t kHugePageBytes = size_t{2} << 20;
constexpr size_t whole_pages(size_t bytes) {
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

// Memory that is mapped until its owner ends.
struct Unmap {
  size_t bytes = 0;
  void operator()(std::byte* memory) const;
};
using Mapping = std::unique_ptr<std::byte, Unmap>;

// Bytes this process can allocate before the kernel's OOM killer acts: the least of what the host and each
// control group above the process have left. Page cache counts as free.
size_t available_memory();

// Throws kLibrary with the remedy if `bytes` for `label` exceed available_memory(). A memfd's tmpfs has no
// size limit, so the kernel would invoke the OOM killer instead of refusing.
void refuse_too_much(const char* label, size_t bytes);

// For a large private buffer that will be written as a whole: huge pages, where the system lets programs choose
// them, spare most of the page faults of memory that is new. A hint, without effect on small buffers.
void prefer_huge_pages(void* begin, size_t bytes);

// Allocates pages of a memfd now; throws kLibrary with the remedy.
void allocate_pages(int fd, const char* label, uint64_t offset, size_t bytes);
// Gives them back; these bytes are zeros again. A failure leaves them as they are.
void free_pages(int fd, uint64_t offset, size_t bytes) noexcept;

}  // namespace farandole
