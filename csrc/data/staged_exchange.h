// SPDX-License-Identifier: Apache-2.0
// Bytes travel through slots in memory that all members map: the way that always works.
#pragma once

#include <cstddef>
#include <cstdint>

#include "data/exchange.h"
#include "kernels/kernels.h"

namespace farandole {

class StagedExchange final : public Exchange {
 public:
  // memory: `slots` slots of block_bytes for each member.
  StagedExchange(std::byte* memory, int member, size_t block_bytes, int slots)
      : memory_(memory),
        member_(member),
        block_bytes_(block_bytes),
        slots_(static_cast<size_t>(slots)) {}

  void offer(uint64_t block, const Range& range, const std::byte* input) override {
    kernels::copy(at(block, range, member_), input, range.bytes);
  }
  const std::byte* reach(uint64_t block, const Range& range, int member) override {
    return at(block, range, member);
  }
  std::byte* result(uint64_t block, const Range& range, std::byte*) override {
    return at(block, range, member_);
  }
  void fetch(uint64_t block, const Range& range, std::byte* output) override {
    kernels::copy(output, at(block, range, range.member), range.bytes);
  }
  bool reads_private_memory() const override { return false; }

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
