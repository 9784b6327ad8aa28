// SPDX-License-Identifier: Apache-2.0
// Limits of available memory, and allocation of shared memory without the risk of SIGBUS.
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

struct Unmap {
  size_t bytes = 0;
  void operator()(std::byte* memory) const;
};
using Mapping = std::unique_ptr<std::byte, Unmap>;

// Bytes that this process can allocate before the kernel's OOM killer acts: the minimum over the host and each control
// group above the process. Page cache counts as free.
size_t available_memory();

// Throws kLibrary with a remedy if `bytes` for `label` exceed available_memory(). A memfd's tmpfs has no size limit, so
// the kernel would invoke the OOM killer instead of refusing.
void refuse_too_much(const char* label, size_t bytes);

// Requests huge pages, which save most page faults of new memory, for a large private buffer that will be fully
// written. A hint, without effect on small buffers.
void prefer_huge_pages(void* begin, size_t bytes);

// Allocates pages of a memfd now. Throws kLibrary with a remedy.
void allocate_pages(int fd, const char* label, uint64_t offset, size_t bytes);
// Frees the pages; their bytes become zero. After a failure they keep their content.
void free_pages(int fd, uint64_t offset, size_t bytes) noexcept;

}  // namespace farandole
