// SPDX-License-Identifier: Apache-2.0
#include "lib/gpu/gpu_double/nccl_memory.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "lib/gpu/gpu_double/hardware.h"

namespace farandole::check {
namespace {

struct Block {
  size_t bytes;
  int known_by = 0;  // communicators
};

std::map<const std::byte*, Block> blocks;
constexpr int kNoDevice = 1;  // ncclUnhandledCudaError

cuda::Address address_of(const void* memory) { return reinterpret_cast<cuda::Address>(memory); }

// The entry of a map by addresses that holds `address`, or end().
auto holding(auto& map, const void* address) {
  auto at = map.upper_bound(static_cast<const std::byte*>(address));
  if (at == map.begin()) return map.end();
  --at;
  return static_cast<const std::byte*>(address) < at->first + at->second.bytes ? at : map.end();
}

}  // namespace

void* Registrations::add(void* memory, size_t bytes) {
  const auto block = holding(blocks, memory);
  if (block == blocks.end() || block->first != memory || block->second.bytes < bytes) {
    return nullptr;
  }
  ++block->second.known_by;
  known_[block->first] = {free_number(), bytes};
  return memory;
}

uint64_t Registrations::free_number() const {
  uint64_t number = 1;
  const auto taken = [&](const auto& entry) { return entry.second.number == number; };
  while (std::ranges::any_of(known_, taken)) ++number;
  return number;
}

bool Registrations::drop(void* handle) {
  if (known_.erase(static_cast<std::byte*>(handle)) == 0) return false;
  --blocks.at(static_cast<std::byte*>(handle)).known_by;
  return true;
}

void Registrations::drop_all() {
  while (!known_.empty()) drop(const_cast<std::byte*>(known_.begin()->first));
}

bool Registrations::place_of(const void* address, uint64_t& place) const {
  place = 0;
  const auto known = holding(known_, address);
  if (known == known_.end()) return holding(blocks, address) == blocks.end();
  const auto offset = static_cast<uint64_t>(static_cast<const std::byte*>(address) - known->first);
  place = (known->second.number << 40) + offset;
  return true;
}

}  // namespace farandole::check

using namespace farandole::check;

extern "C" int ncclMemAlloc(void** memory, size_t bytes) {
  return call("ncclMemAlloc", [&](Hardware& hardware) -> int {
    constexpr size_t kAlignment = 4096;
    const std::optional<int> device = current_device();
    if (!device) return kNoDevice;
    *memory = std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
    blocks[static_cast<std::byte*>(*memory)] = {bytes};
    hardware.devices_of_memory[address_of(*memory)] = {*device, bytes};
    ++hardware.alive;
    return 0;
  });
}

extern "C" int ncclMemFree(void* memory) {
  return call("ncclMemFree", [&](Hardware& hardware) -> int {
    const auto block = blocks.find(static_cast<std::byte*>(memory));
    if (block == blocks.end()) return 1;
    if (block->second.known_by > 0) {
      std::fprintf(stderr, "NCCL double: memory is freed that a communicator knows\n");
      std::abort();
    }
    blocks.erase(block);
    hardware.devices_of_memory.erase(address_of(memory));
    std::free(memory);
    --hardware.alive;
    return 0;
  });
}
