// SPDX-License-Identifier: Apache-2.0
// What each phase of a block between hosts does to its bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "data/hierarchical/flight.h"
#include "data/hierarchical/host_map.h"
#include "data/plane/plane.h"

namespace farandole {

class CrossWorker {
 public:
  // memory: of this host's members; each has `slots` slots, and each of these room for inputs and for results.
  CrossWorker(const HostMap& hosts, int member, std::byte* memory, uint64_t slots,
              size_t block_bytes);
  static size_t bytes_needed(int local_members, size_t block_bytes, int slots) {
    return static_cast<size_t>(local_members) * static_cast<size_t>(slots) * 2 * block_bytes;
  }

  // The bucket that all later calls are about.
  void start(std::span<const Part> parts) { parts_ = parts; }
  // `block`: its number, which tells its slot.
  void stage(uint64_t block, const Flight& flight) const;
  void reduce(uint64_t block, Flight& flight);
  void combine(Flight& flight);
  // Results that this member made or received, to where its neighbours reach them.
  void publish(uint64_t block, const Flight& flight) const;
  void consume(uint64_t block, const Flight& flight) const;

 private:
  void stage_chunk(uint64_t block, const Flight& f, const Chunk& chunk) const;
  void reduce_chunk(uint64_t block, Flight& f, const Flight::Job& job);
  void combine_chunk(Flight& f, const Flight::Job& job);
  void consume_chunk(uint64_t block, const Flight& f, const Chunk& chunk) const;
  std::byte* staged(uint64_t block, int member, const Chunk& chunk) const;
  std::byte* published(uint64_t block, int member, const Chunk& chunk) const;
  std::byte* slot(uint64_t block, int member) const;

  const HostMap& hosts_;
  const int member_;
  const int host_;
  const std::vector<int>& locals_;
  std::byte* const memory_;
  const uint64_t slots_;
  const size_t block_bytes_;
  std::span<const Part> parts_;
  std::vector<const void*> inputs_;  // scratch
};

}  // namespace farandole
