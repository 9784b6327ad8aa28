// SPDX-License-Identifier: Apache-2.0
// Available memory, and allocation of shared memory such that no later access can raise SIGBUS.
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

// Returns the number of bytes that this process can allocate before the kernel's OOM killer acts. This is the minimum
// over the host and the control groups that contain the process. Page cache counts as free memory.
size_t available_memory();

// Throws Error(kLibrary) with a remedy if `bytes` exceeds available_memory(). The kernel does not refuse a memfd that
// is too large, but invokes the OOM killer. `label` is the purpose of the memory.
void refuse_too_much(const char* label, size_t bytes);

// Asks for huge pages, which save page faults, in a private buffer that will be fully written. Ignores small buffers.
void prefer_huge_pages(void* begin, size_t bytes);

// Allocates pages of a memfd. On failure, throws Error(kLibrary) with a remedy.
void allocate_pages(int fd, const char* label, uint64_t offset, size_t bytes);
// Frees pages of a memfd, whose bytes then become zero. If this fails, the pages keep their content.
void free_pages(int fd, uint64_t offset, size_t bytes) noexcept;

}  // namespace farandole
