// SPDX-License-Identifier: Apache-2.0
// One bucket as at most three launches: a pack kernel, one group of NCCL calls, an unpack kernel. Made in
// two passes over the same code: the first measures the scratch memory, the second knows its address.
#pragma once

#include <map>
#include <span>
#include <vector>

#include "data/gpu/gpu_mover.h"
#include "data/nccl/nccl_wire.h"
#include "lib/gpu/gpu_window.h"

namespace farandole {

struct NcclCall {
  enum class Kind { kAllReduce, kBroadcast, kReduce, kAllGather, kReduceScatter, kSend, kReceive };
  Kind kind;
  cuda::Address input = 0;
  cuda::Address output = 0;
  size_t count = 0;
  nccl::DataType type = nccl::kInt8;
  nccl::RedOp op = nccl::kSum;
  double weight = 1.0;  // other than 1: the operator is a weighted sum
  int peer = 0;         // or the root
};

// Whether a part has a place that all members can use: NCCL must meet registered memory on all of them or on
// none, and who has no input may have no window either, having joined.
bool may_be_placed(const Part& part);

class NcclSchedule {
 public:
  // Small parts share one call; larger ones are reduced where they are.
  static constexpr size_t kPackedBytes = 1 << 20;  // of one part, at most

  // `windows`: this rank's; nullptr: none. `plain_sums`: as wire_of()'s, equal on all members.
  NcclSchedule(int member, int members, const GpuWindows* windows = nullptr,
               bool plain_sums = false)
      : member_(member), members_(members), open_windows_(windows), plain_sums_(plain_sums) {}

  // Where windows begin, by number: all that may be used, and more. Tensors with a place there are reduced there,
  // in one call with those that lie beside them. What lies in a window otherwise goes through scratch memory.
  using Windows = std::map<uint32_t, cuda::Address>;
  void make(std::span<const Part> parts, cuda::Address scratch, const Windows& windows = {});

  MoveList pack, unpack;
  std::vector<NcclCall> calls;
  size_t scratch_bytes() const { return used_; }

 private:
  struct Reduction {
    const Part* part;
    NcclWire wire;
    size_t numbers() const {
      return static_cast<size_t>(part->signature.elements()) * wire.per_element;
    }
  };

  cuda::Address take(size_t bytes);
  bool in_window(const std::byte* buffer) const;
  cuda::Address read(const std::byte* input, size_t bytes);
  cuda::Address write(std::byte* output, size_t bytes);
  void plan_placed(std::vector<Reduction> reductions, const Windows& windows);
  void plan_allreduces(std::vector<Reduction> reductions);
  bool goes_direct(const Reduction& one) const;
  void plan_direct(const Reduction& one);
  void plan_packed(std::span<const Reduction> some);
  void bring_in(const Reduction& one, cuda::Address target);
  void plan_reducescatter(const Reduction& one);
  void plan_broadcast(const Part& part);
  void plan_allgather(const Part& part);
  void plan_alltoall(const Part& part);

  const int member_;
  const int members_;
  const GpuWindows* const open_windows_;
  const bool plain_sums_;
  cuda::Address scratch_ = 0;
  size_t used_ = 0;
};

}  // namespace farandole
