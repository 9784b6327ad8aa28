// SPDX-License-Identifier: Apache-2.0
#include "lib/gpu/gpu_double/device_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>

#include "lib/gpu/gpu_double/hardware.h"

namespace farandole::check {
namespace {

std::map<cuda::Address, Mapping> mappings;

void* pointer(cuda::Address address) { return reinterpret_cast<void*>(address); }

cuda::Address mapped(void* wanted, size_t bytes, int protection, int flags, int file,
                     size_t offset) {
  void* const start = mmap(wanted, bytes, protection, flags, file, static_cast<off_t>(offset));
  if (start == MAP_FAILED) {
    std::perror("GPU double: mmap");
    std::abort();
  }
  return reinterpret_cast<cuda::Address>(start);
}

}  // namespace

Allocation* allocate(size_t bytes, int device) {
  const int file = memfd_create("gpu_double", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) return nullptr;
  return open_allocation(file, bytes, device);
}

Allocation* open_allocation(int file, size_t bytes, int device) {
  return new Allocation{file, bytes, device};
}

void release(Allocation* allocation) {
  if (--allocation->references > 0) return;
  close(allocation->file);
  delete allocation;
}

cuda::Address reserve(size_t bytes) {
  return mapped(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

void unreserve(cuda::Address start, size_t bytes) { munmap(pointer(start), bytes); }

void map(cuda::Address start, size_t bytes, size_t offset, Allocation* allocation) {
  mapped(pointer(start), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, allocation->file,
         offset);
  ++allocation->references;
  mappings[start] = {start, bytes, allocation};
  if (allocation->device < 0) return;
  Hardware::instance().devices_of_memory[start] = {allocation->device, bytes};
}

// The addresses stay reserved.
void unmap(cuda::Address start) {
  const auto found = mappings.find(start);
  if (found == mappings.end()) return;
  mapped(pointer(start), found->second.bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  Hardware::instance().devices_of_memory.erase(start);
  release(found->second.allocation);
  mappings.erase(found);
}

std::optional<Mapping> mapping_of(cuda::Address address) {
  auto at = mappings.upper_bound(address);
  if (at == mappings.begin()) return std::nullopt;
  --at;
  if (address >= at->first + at->second.bytes) return std::nullopt;
  return at->second;
}

}  // namespace farandole::check
