// SPDX-License-Identifier: Apache-2.0
// Device memory that other processes can map: a memfd for every allocation. All functions under the hardware's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "lib/gpu/cuda.h"

namespace farandole::check {

// A physical allocation, as cuMemCreate makes one. It ends with its last reference; a mapping is one.
struct Allocation {
  int file;
  size_t bytes;
  int device;  // -1: the host's
  int references = 1;
};

// What another process needs to open one.
struct IpcHandle {
  int process;
  int file;
  uint64_t bytes;
  int device;
};
static_assert(sizeof(IpcHandle) <= 64);  // CUDA's

struct Mapping {
  cuda::Address start;
  size_t bytes;
  Allocation* allocation;
};

Allocation* allocate(size_t bytes, int device);
Allocation* open_allocation(int file, size_t bytes, int device);  // takes over the file
void release(Allocation* allocation);

cuda::Address reserve(size_t bytes);
void unreserve(cuda::Address start, size_t bytes);
void map(cuda::Address start, size_t bytes, size_t offset, Allocation* allocation);
void unmap(cuda::Address start);
std::optional<Mapping> mapping_of(cuda::Address address);

}  // namespace farandole::check
