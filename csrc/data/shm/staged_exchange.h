// SPDX-License-Identifier: Apache-2.0
// Bytes travel through slots in memory that all members map: the way that always works.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "data/shm/exchange.h"
#include "kernels/kernels.h"

namespace farandole {

class StagedExchange final : public Exchange {
 public:
  // memory: bytes_needed(), aligned to 64.
  StagedExchange(std::byte* memory, int member, size_t block_bytes, int slots)
      : memory_(memory),
        member_(member),
        block_bytes_(block_bytes),
        slots_(static_cast<size_t>(slots)) {}
  static size_t bytes_needed(int members, size_t block_bytes, int slots) {
    return static_cast<size_t>(members) * static_cast<size_t>(slots) * block_bytes;
  }

  void open(uint64_t, const Block&) override {}
  bool offer(uint64_t block, const Range& range, const Part& part) override {
    kernels::copy(at(block, range, member_), part.input + range.input, range.bytes);
    return false;
  }
  void expect(uint64_t, const Range&, const Part&) override {}
  const std::byte* reach(uint64_t block, const Range& range, int member) override {
    return at(block, range, member);
  }
  void deliver(uint64_t block, const Range& range, std::vector<std::byte*>& targets) override {
    targets.push_back(at(block, range, member_));
  }
  std::byte* scratch(uint64_t block, const Range& range) override {
    return at(block, range, member_);
  }
  void fetch(uint64_t block, const Range& range, const Part& part) override {
    kernels::copy(part.output + range.output, at(block, range, range.member), range.bytes);
  }
  void abandon(std::span<const Part>) override {}

 private:
  std::byte* at(uint64_t block, const Range& range, int member) const {
    const size_t slot = static_cast<size_t>(member) * slots_ + block % slots_;
    return memory_ + slot * block_bytes_ + range.slot;
  }

  std::byte* const memory_;
  const int member_;
  const size_t block_bytes_;
  const size_t slots_;
};

}  // namespace farandole
