// SPDX-License-Identifier: Apache-2.0
#include "lib/gpu/gpu_double/nccl_launch.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kernels/kernels.h"

namespace farandole::check {
namespace {

void reduce(const std::vector<std::vector<Call>>& calls, size_t index, size_t offset,
            std::byte* out, size_t count) {
  const Call& call = calls[0][index];
  std::vector<const void*> inputs;
  for (const auto& of_rank : calls) inputs.push_back(of_rank[index].input + offset);
  constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMax, ReduceOp::kMin};
  kernels::reduce(dtype_of(call.type), kOps[call.op], out, inputs.data(),
                  static_cast<int>(inputs.size()), count, {1.0, 1.0, 1});
}

std::vector<std::byte> result_of(const Launch& launch, int rank, size_t index) {
  const Call& call = launch.calls[static_cast<size_t>(rank)][index];
  const size_t size = size_of(dtype_of(call.type));
  const size_t bytes = call.count * size;
  std::vector<std::byte> out(bytes);
  const auto input_of = [&](int r) { return launch.calls[static_cast<size_t>(r)][index].input; };
  switch (call.what) {
    case What::kAllReduce: reduce(launch.calls, index, 0, out.data(), call.count); break;
    case What::kReduce:
      if (rank != call.peer) return {};
      reduce(launch.calls, index, 0, out.data(), call.count);
      break;
    case What::kReduceScatter:
      reduce(launch.calls, index, static_cast<size_t>(rank) * bytes, out.data(), call.count);
      break;
    case What::kBroadcast: std::copy_n(input_of(call.peer), bytes, out.begin()); break;
    case What::kAllGather:
      out.resize(bytes * launch.calls.size());
      for (size_t r = 0; r < launch.calls.size(); ++r) {
        std::copy_n(input_of(static_cast<int>(r)), bytes, out.data() + r * bytes);
      }
      break;
    default: break;
  }
  return out;
}

bool sound(const Launch& launch) {
  const std::vector<Call>& first = launch.calls[0];
  for (const std::vector<Call>& calls : launch.calls) {
    if (!std::ranges::equal(calls, first,
                            [](const Call& a, const Call& b) { return a.matches(b); })) {
      return false;
    }
  }
  return true;
}

struct Delivery {
  std::byte* to;
  std::vector<std::byte> bytes;
};

}  // namespace

DType dtype_of(DataType type) {
  constexpr DType kTypes[] = {DType::kInt8,    DType::kUInt8,   DType::kInt32,   DType::kUInt32,
                              DType::kInt64,   DType::kUInt64,  DType::kFloat16, DType::kFloat32,
                              DType::kFloat64, DType::kBFloat16};
  return kTypes[type];
}

size_t bytes_of(const Call& call) { return call.count * size_of(dtype_of(call.type)); }

// Real NCCL hangs or corrupts memory when ranks disagree; here the test ends. In-place calls overlap, so
// everything is read before anything is written.
void run(Launch& launch) {
  if (launch.done) return;
  launch.done = true;
  if (!sound(launch)) {
    std::fprintf(stderr, "NCCL double: ranks disagree about a launch\n");
    std::abort();
  }
  std::vector<Delivery> deliveries;
  for (size_t rank = 0; rank < launch.calls.size(); ++rank) {
    for (size_t i = 0; i < launch.calls[rank].size(); ++i) {
      if (!launch.calls[rank][i].output) continue;  // of another process
      deliveries.push_back(
          {launch.calls[rank][i].output, result_of(launch, static_cast<int>(rank), i)});
    }
  }
  for (const Delivery& one : deliveries) {
    if (!one.bytes.empty()) std::memcpy(one.to, one.bytes.data(), one.bytes.size());
  }
}

}  // namespace farandole::check
