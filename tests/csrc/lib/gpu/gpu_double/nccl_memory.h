// SPDX-License-Identifier: Apache-2.0
// Memory of the NCCL double, and which communicators know it. Freeing what one knows ends the test, as does using
// memory of NCCL's own that the communicator does not know: real NCCL would be free to do anything.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace farandole::check {

// Of one communicator. Under the hardware's lock, as all calls.
class Registrations {
 public:
  void* add(void* memory, size_t bytes);  // nullptr: no such memory
  bool drop(void* handle);
  void drop_all();
  bool empty() const { return known_.empty(); }
  // False: memory of NCCL's own that is not known here. place: 0 for ordinary memory; else the number among the
  // registrations and the offset.
  bool place_of(const void* address, uint64_t& place) const;

 private:
  struct Known {
    uint64_t number;
    size_t bytes;
  };
  // The lowest that is free: as in NCCL's address space (2.28.9 src/dev_runtime.cc:385), where ranks that differ in what
  // they have registered, or in its order, would reduce different memory.
  uint64_t free_number() const;
  std::map<const std::byte*, Known> known_;
};

}  // namespace farandole::check
