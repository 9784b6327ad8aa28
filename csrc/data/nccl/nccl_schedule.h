// SPDX-License-Identifier: Apache-2.0
// One bucket as at most three launches: a pack kernel, one group of NCCL calls, an unpack kernel. Made in
// two passes over the same code: the first measures the scratch memory, the second knows its address.
#pragma once

#include <map>
#include <span>
#include <vector>

#include "base/types.h"
#include "data/backend/backend.h"
#include "data/gpu/gpu_mover.h"
#include "lib/gpu/gpu_window.h"
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
  double weight = 1.0;  // not 1: a sum of weight * input, not op; float32, float64 only
  // target = source * factor / divisor, before and after
  double factor_in = 1.0, factor_out = 1.0;
  int64_t divisor_in = 1, divisor_out = 1;

  bool converts_in() const { return type != element || factor_in != 1.0 || divisor_in != 1; }
  bool converts_out() const { return type != element || factor_out != 1.0 || divisor_out != 1; }
  // Calls that may share one packed buffer.
  bool same_call(const NcclForm& other) const {
    return type == other.type && op == other.op && weight == other.weight &&
           identity == other.identity;
  }
};

// Of an allreduce or a reducescatter. `plain_sums`: a sum of floats has no weight, and our kernel scales it afterwards,
// because NCCL's symmetric kernels, which reduce windows in place (2.28.9 src/sym_kernels.cc:269), and the adders of a switch
// take no weighted sums. One division also rounds less than a factor for each input. float16 would overflow: our kernel
// scales it first.
NcclForm form_of(const Part& part, int members, bool plain_sums);

nccl::DataType nccl_type(DType type);  // of a NcclForm's type

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

  // `windows`: this rank's; nullptr: none. `plain_sums`: as form_of()'s, equal on all members.
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
    NcclForm form;
    size_t numbers() const {
      return static_cast<size_t>(part->signature.elements()) * form.per_element;
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
