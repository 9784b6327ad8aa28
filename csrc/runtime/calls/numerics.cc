// SPDX-License-Identifier: Apache-2.0
#include "runtime/calls/numerics.h"

#include <algorithm>
#include <string>

#include "base/abi.h"
#include "kernels/kernels.h"
#include "runtime/calls/request_checks.h"

namespace farandole {

Failure numerics_of(const Request& request, const Submission& submission, Rank own) {
  const Signature& signature = request.signature;
  const bool here = signature.device == kCpuDevice && signature.traits().moves_bytes();
  if (!brings_input(signature, own) || !here || submission.input == nullptr) return {};
  size_t elements = 1;
  for (int64_t n : submission.shape) elements *= static_cast<size_t>(n);
  const size_t bad = kernels::first_not_finite(signature.dtype, submission.input, elements);
  if (bad == elements) return {};
  const std::string name = request.name.empty() ? "unnamed" : "'" + request.name + "'";
  return {ErrorCode::kInvalidArgument, std::string(name_of(signature.op)) + " " + name +
                                           ": the input of rank " + std::to_string(own) +
                                           " holds NaN or infinity, first at element " +
                                           std::to_string(bad) + " of " + std::to_string(elements) +
                                           " (FARANDOLE_CHECK_NUMERICS=1 looks for it)"};
}

Failure numerics_of(std::span<const farandole_request> requests, Rank own) {
  for (const farandole_request& raw : requests) {
    const bool sound =
        raw.dtype >= 0 && raw.dtype < kDTypeCount && raw.ndim >= 0 &&
        std::all_of(raw.shape, raw.shape + raw.ndim, [](int64_t n) { return n >= 0; });
    if (!sound) continue;
    Request request = name_of_request(raw);
    request.signature.dtype = static_cast<DType>(raw.dtype);
    request.signature.device = raw.device;
    const bool sends = request.signature.traits().end == End::kSender;
    request.signature.root = sends ? own : raw.root;
    Submission submission;
    submission.shape = Dimensions({raw.shape, static_cast<size_t>(raw.ndim)});
    submission.input = static_cast<const std::byte*>(raw.input);
    if (Failure failure = numerics_of(request, submission, own)) return failure;
  }
  return {};
}

}  // namespace farandole
