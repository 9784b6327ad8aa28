// SPDX-License-Identifier: Apache-2.0
// One bucket as at most three launches: a pack kernel, one group of NCCL calls, an unpack kernel. Made in
// two passes over the same code: the first measures the scratch memory, the second knows its address.
#pragma once

#include <span>
#include <vector>

#include "base/types.h"
#include "data/backend/backend.h"
#include "data/gpu/gpu_mover.h"
#include "lib/gpu/nccl.h"

namespace farandole {

// How a reduction looks to NCCL: which type it adds, which operator, and what our kernel does before and
// after. Integers keep the shared-memory backend's rules (small ones are added in wider ones, divisions truncate).
struct NcclForm {
  DType element;  // the part's own real type: a complex number is two of them, a bool a uint8
  size_t per_element = 1;  // real numbers in one element
  DType type;              // what NCCL adds
  nccl::RedOp op = nccl::kSum;
  ReduceOp identity = ReduceOp::kSum;  // whose identity a member without input brings
  // target = source * factor / divisor, before and after
  double factor_in = 1.0, factor_out = 1.0;
  int64_t divisor_in = 1, divisor_out = 1;

  bool converts_in() const { return type != element || factor_in != 1.0 || divisor_in != 1; }
  bool converts_out() const { return type != element || factor_out != 1.0 || divisor_out != 1; }
  // Calls that may share one packed buffer.
  bool same_call(const NcclForm& other) const {
    return type == other.type && op == other.op && identity == other.identity;
  }
};

// For an allreduce or a reducescatter. A sum of floats is a plain one, which our kernel scales afterwards, because the adders
// of a switch take no weighted sums, and one division rounds less than a factor for each input. float16 would overflow: our
// kernel scales it first.
NcclForm form_of(const Part& part);

nccl::DataType nccl_type(DType type);  // of a NcclForm's type

struct NcclCall {
  enum class Kind { kAllReduce, kBroadcast, kReduce, kAllGather, kReduceScatter, kSend, kReceive };
  Kind kind;
  cuda::Address input = 0;
  cuda::Address output = 0;
  size_t count = 0;
  nccl::DataType type = nccl::kInt8;
  nccl::RedOp op = nccl::kSum;
  int peer = 0;  // or the root
};

class NcclSchedule {
 public:
  // Small parts share one call; larger ones are reduced where they are.
  static constexpr size_t kPackedBytes = 1 << 20;  // of one part, at most

  NcclSchedule(int member, int members) : member_(member), members_(members) {}

  void make(std::span<const Part> parts, cuda::Address scratch);

  MoveList pack, unpack;
  std::vector<NcclCall> calls;
  size_t scratch_bytes() const { return used_; }

 private:
  struct Reduction {
    const Part* part;
    NcclForm form;
    size_t numbers() const {
      return static_cast<size_t>(part->signature.elements()) * form.per_element;
    }
  };

  cuda::Address take(size_t bytes);
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
  cuda::Address scratch_ = 0;
  size_t used_ = 0;
};

}  // namespace farandole
