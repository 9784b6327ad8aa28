// SPDX-License-Identifier: Apache-2.0
// The functions of this file only compute addresses. They call neither CUDA nor NCCL.
#include "data/nccl/nccl_schedule.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "data/backend/backend.h"

namespace farandole {
namespace {

// Returns the type in which NCCL adds integers. This is usually their own type. If NCCL lacks that type, or if sums are
// scaled, it is their accumulator type (DTypeTraits::carrier), because small types would overflow before the division.
DType integer_form(DType type, bool scaled) {
  const DTypeTraits& traits = traits_of(type);
  return scaled || traits.nccl < 0 ? traits.carrier : type;
}

void scale_floats(NcclForm& form, const Signature& s, int64_t divisor) {
  if (form.type == DType::kFloat16) {
    form.factor_in = s.prescale;
    form.divisor_in = divisor;
  } else {
    form.factor_out = s.prescale * s.postscale;
    form.divisor_out = divisor;
  }
}

constexpr size_t kAlignment = 256;  // alignment of scratch buffers
constexpr size_t kPackAlignment = 16;

cuda::Address address_of(const std::byte* pointer) {
  return static_cast<cuda::Address>(reinterpret_cast<uintptr_t>(pointer));
}

NcclCall call_of(const Part& part, const NcclForm& form, cuda::Address input, cuda::Address output,
                 size_t count) {
  const Rank target = part.signature.target();
  const auto kind = target < 0 ? NcclCall::Kind::kAllReduce : NcclCall::Kind::kReduce;
  return {kind, input, output, count, nccl_type(form.type), form.op, target};
}

}  // namespace

NcclForm form_of(const Part& part) {
  const Signature& s = part.signature;
  const ReduceOpTraits& reduction = traits_of(s.reduce_op);
  const int64_t divisor = factors_of(part).divisor;
  NcclForm form;
  form.element = form.type = traits_of(s.dtype).real;
  const bool is_float = traits_of(form.element).is_float();
  form.per_element = size_of(s.dtype) / size_of(form.element);
  form.op = reduction.nccl;
  form.identity = reduction.sums ? ReduceOp::kSum : s.reduce_op;
  form.factor_out = s.postscale;
  if (is_float && reduction.sums) {
    scale_floats(form, s, divisor);
    return form;
  }
  form.factor_in = s.prescale;
  form.divisor_out = divisor;
  const bool scaled = s.prescale != 1.0 || s.postscale != 1.0 || divisor != 1;
  if (!is_float) form.type = integer_form(form.element, scaled);
  return form;
}

nccl::DataType nccl_type(DType type) {
  const nccl::DataType found = traits_of(type).nccl;
  if (found < 0) throw Error(ErrorCode::kInternal, std::string("NCCL has no ") + name_of(type));
  return found;
}

void NcclSchedule::make(std::span<const Part> parts, cuda::Address scratch) {
  pack.clear();
  unpack.clear();
  calls.clear();
  scratch_ = scratch;
  used_ = 0;
  std::vector<Reduction> allreduces;
  for (const Part& part : parts) {
    switch (part.signature.traits().pattern) {
      case Pattern::kReduceToAll: allreduces.push_back({&part, form_of(part)}); break;
      case Pattern::kReduceToOwners: plan_reducescatter({&part, form_of(part)}); break;
      case Pattern::kOneToAll: plan_broadcast(part); break;
      case Pattern::kEachToAll: plan_allgather(part); break;
      case Pattern::kEachToEach: plan_alltoall(part); break;
      case Pattern::kMeet: break;
      case Pattern::kNone: throw Error(ErrorCode::kInternal, "invalid operation on a GPU");
    }
  }
  plan_allreduces(std::move(allreduces));
}

cuda::Address NcclSchedule::take(size_t bytes) {
  const cuda::Address address = scratch_ + used_;
  used_ += round_up(bytes, kAlignment);
  return address;
}

// Depends only on the signature, so that every member makes the same calls, whether it has buffers or not.
bool NcclSchedule::goes_direct(const Reduction& one) const {
  return one.part->signature.bytes() > kPackedBytes;
}

void NcclSchedule::plan_allreduces(std::vector<Reduction> reductions) {
  while (!reductions.empty()) {
    const Reduction first = reductions.front();
    if (goes_direct(first)) {
      plan_direct(first);
      reductions.erase(reductions.begin());
      continue;
    }
    const auto rest =
        std::stable_partition(reductions.begin(), reductions.end(), [&](const Reduction& other) {
          return !goes_direct(other) && other.form.same_call(first.form) &&
                 other.part->signature.target() == first.part->signature.target();
        });
    const std::span<const Reduction> same(reductions.begin(), rest);
    if (same.size() == 1) {
      plan_direct(first);
    } else {
      plan_packed(same);
    }
    reductions.erase(reductions.begin(), rest);
  }
}

// Writes this member's input, or the neutral element, in NCCL's type.
void NcclSchedule::bring_in(const Reduction& one, cuda::Address target) {
  const NcclForm& form = one.form;
  if (one.part->input) {
    pack.convert(target, form.type, address_of(one.part->input), form.element, one.numbers(),
                 form.factor_in, form.divisor_in);
  } else {
    pack.fill_identity(target, form.type, form.identity, one.numbers());
  }
}

void NcclSchedule::plan_direct(const Reduction& one) {
  const NcclForm& form = one.form;
  const Part& part = *one.part;
  const size_t bytes = one.numbers() * size_of(form.type);
  cuda::Address input = address_of(part.input);
  cuda::Address output = address_of(part.output);
  if (!part.input || form.converts_in()) {
    input = take(bytes);
    bring_in(one, input);
  }
  const bool through_scratch = !part.output || form.type != form.element;
  if (!gets_result(part.signature, member_)) {
    output = 0;
  } else if (through_scratch) {
    output = input == address_of(part.input) ? take(bytes) : input;
  }
  calls.push_back(call_of(part, form, input, output, one.numbers()));
  if (part.output && (form.converts_out() || output != address_of(part.output))) {
    unpack.convert(address_of(part.output), form.element, output, form.type, one.numbers(),
                   form.factor_out, form.divisor_out);
  }
}

void NcclSchedule::plan_packed(std::span<const Reduction> some) {
  const NcclForm& form = some.front().form;  // same_call() holds for all
  size_t bytes = 0;
  for (const Reduction& one : some) {
    bytes += round_up(one.numbers() * size_of(form.type), kPackAlignment);
  }
  const cuda::Address buffer = take(bytes);
  cuda::Address at = buffer;
  for (const Reduction& one : some) {
    bring_in(one, at);
    if (one.part->output) {
      unpack.convert(address_of(one.part->output), one.form.element, at, form.type, one.numbers(),
                     one.form.factor_out, one.form.divisor_out);
    }
    at += round_up(one.numbers() * size_of(form.type), kPackAlignment);
  }
  calls.push_back(call_of(*some.front().part, form, buffer, buffer, bytes / size_of(form.type)));
}

// Uses scratch memory if NCCL cannot write to the output: there is none, the types differ, or it overlaps the input.
void NcclSchedule::plan_reducescatter(const Reduction& one) {
  const NcclForm& form = one.form;
  const Part& part = *one.part;
  const size_t size = size_of(form.type);
  const auto numbers_of = [&](int member) {
    return static_cast<size_t>(part.rows[static_cast<size_t>(member)]) *
           static_cast<size_t>(part.signature.row_elements()) * form.per_element;
  };
  const size_t mine = numbers_of(member_);
  cuda::Address input = address_of(part.input);
  if (!part.input || form.converts_in()) {
    input = take(one.numbers() * size);
    bring_in(one, input);
  }
  const cuda::Address target = address_of(part.output);
  const bool overlaps = overlap(target, mine * size, input, one.numbers() * size);
  const bool through_scratch = !part.output || form.type != form.element || overlaps;
  const cuda::Address output = through_scratch ? take(mine * size) : target;
  const bool even = std::ranges::all_of(part.rows, [&](int64_t n) { return n == part.rows[0]; });
  if (even) {
    calls.push_back(
        {NcclCall::Kind::kReduceScatter, input, output, mine, nccl_type(form.type), form.op});
  }
  size_t before = 0;
  for (int member = 0; member < members_ && !even; ++member) {
    const size_t count = numbers_of(member);
    if (count > 0) {
      calls.push_back({NcclCall::Kind::kReduce, input + before * size,
                       member == member_ ? output : 0, count, nccl_type(form.type), form.op,
                       member});
    }
    before += count;
  }
  if (part.output && (through_scratch || form.converts_out())) {
    unpack.convert(target, form.element, output, form.type, mine, form.factor_out,
                   form.divisor_out);
  }
}

void NcclSchedule::plan_broadcast(const Part& part) {
  const size_t bytes = part.signature.bytes();
  const bool root = part.signature.root == member_;
  const cuda::Address source = root ? address_of(part.input) : 0;
  cuda::Address output = address_of(part.output);
  if (!output) output = root ? source : take(bytes);
  const cuda::Address input = root ? source : output;
  calls.push_back({NcclCall::Kind::kBroadcast, input, output, bytes, nccl::kInt8, nccl::kSum,
                   part.signature.root});
}

void NcclSchedule::plan_allgather(const Part& part) {
  const size_t row = part.signature.row_bytes();
  const auto rows = std::accumulate(part.rows.begin(), part.rows.end(), int64_t{0});
  const size_t mine = static_cast<size_t>(part.rows[static_cast<size_t>(member_)]) * row;
  const cuda::Address input = address_of(part.input);
  cuda::Address output = address_of(part.output);
  if (!output) output = take(static_cast<size_t>(rows) * row);
  const bool even = std::ranges::all_of(part.rows, [&](int64_t n) { return n == part.rows[0]; });
  if (even) {
    calls.push_back({NcclCall::Kind::kAllGather, input, output, mine});
    return;
  }
  for (int member = 0; member < members_; ++member) {
    const size_t bytes = static_cast<size_t>(part.rows[static_cast<size_t>(member)]) * row;
    if (bytes == 0) continue;
    NcclCall call{NcclCall::Kind::kBroadcast, output, output, bytes};
    if (member == member_) call.input = input;
    call.peer = member;
    calls.push_back(call);
    output += bytes;
  }
}

void NcclSchedule::plan_alltoall(const Part& part) {
  const PartLayout layout(part, members_);
  const size_t received = layout.output_bytes(member_);
  cuda::Address input = address_of(part.input);
  cuda::Address output = address_of(part.output);
  if (!output) output = take(received);
  for (int peer = 0; peer < members_; ++peer) {
    const size_t gives = layout.bytes_between(member_, peer);
    const size_t gets = layout.bytes_between(peer, member_);
    if (gives > 0) {
      calls.push_back({NcclCall::Kind::kSend, input, 0, gives, nccl::kInt8, nccl::kSum, peer});
    }
    if (gets > 0) {
      calls.push_back({NcclCall::Kind::kReceive, 0, output, gets, nccl::kInt8, nccl::kSum, peer});
    }
    input += gives;
    output += gets;
  }
}

}  // namespace farandole
