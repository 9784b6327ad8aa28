// SPDX-License-Identifier: Apache-2.0
// Plans a bucket as at most three launches: a pack kernel, a group of NCCL calls, and an unpack kernel. make() is
// called twice: first to measure the scratch memory, then with the address of that memory.
#pragma once

#include <span>
#include <vector>

#include "base/types.h"
#include "data/backend/backend.h"
#include "data/gpu/gpu_mover.h"
#include "lib/gpu/nccl.h"

namespace farandole {

// Describes a reduction for NCCL: its type, its operator, and the conversions by farandole's kernel before and after
// it. Integers follow the rules of kernels/kernels.h: small integers are added in wider types, and divisions truncate.
struct NcclForm {
  DType element;           // DTypeTraits::real of the part's type
  size_t per_element = 1;  // number of real numbers in an element
  DType type;              // the type that NCCL adds
  nccl::RedOp op = nccl::kSum;
  ReduceOp identity = ReduceOp::kSum;  // the op whose neutral element stands for a missing input
  // A conversion computes target = source * factor / divisor, before (in) and after (out) the reduction.
  double factor_in = 1.0, factor_out = 1.0;
  int64_t divisor_in = 1, divisor_out = 1;

  bool converts_in() const { return type != element || factor_in != 1.0 || divisor_in != 1; }
  bool converts_out() const { return type != element || factor_out != 1.0 || divisor_out != 1; }
  // True if two calls may share one packed buffer.
  bool same_call(const NcclForm& other) const {
    return type == other.type && op == other.op && identity == other.identity;
  }
};

// Returns the form of an allreduce or reducescatter. Floats are scaled after adding, because network switches can only
// add and one division rounds less than a factor for each input. float16 is scaled first, so that sums do not overflow.
NcclForm form_of(const Part& part);

nccl::DataType nccl_type(DType type);  // returns NCCL's data type for NcclForm::type

struct NcclCall {
  enum class Kind { kAllReduce, kBroadcast, kReduce, kAllGather, kReduceScatter, kSend, kReceive };
  Kind kind;
  cuda::Address input = 0;
  cuda::Address output = 0;
  size_t count = 0;
  nccl::DataType type = nccl::kInt8;
  nccl::RedOp op = nccl::kSum;
  int peer = 0;  // the peer or the root
};

class NcclSchedule {
 public:
  // Parts of at most this size share one call. Larger parts are reduced in place.
  static constexpr size_t kPackedBytes = 1 << 20;

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
