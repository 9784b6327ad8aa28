// SPDX-License-Identifier: Apache-2.0
#include "runtime/submitter.h"

#include <exception>
#include <utility>

#include "base/abi.h"
#include "base/error.h"

namespace farandole {

CheckedCall Submitter::check(const farandole_request& request, bool repeats) {
  const ProcessSet set = calls_.set_of(name_of_request(request));
  CheckedCall call = check_request(request, set, own_);
  call.request.signature.window_range = gpus_.window_range_of(call.request);
  if (repeats) return call;
  check_buffers(call.request, call.submission, set);
  Failure unsound;
  if (check_numerics_) unsound = numerics_of(call.request, call.submission, own_);
  if (unsound) throw Error(unsound.code, unsound.text);
  return call;
}

std::vector<Handle> Submitter::submit(std::span<const farandole_request> requests) {
  std::vector<Handle> handles;
  std::exception_ptr error;
  try {
    gpus_.open(requests);
    std::vector<CheckedCall> calls;
    for (const farandole_request& request : requests) calls.push_back(check(request, false));
    gpus_.mark_produced(calls);
    handles = calls_.submit(std::move(calls));
  } catch (const NameTaken& e) {
    refuse(requests, e, true);
    error = std::current_exception();
  } catch (const Error& e) {
    refuse(requests, e, false);
    error = std::current_exception();
  }
  driver_.after_submit();
  if (error) std::rethrow_exception(error);
  return handles;
}

CheckedCall Submitter::prepare(const farandole_request& request) {
  gpus_.open({&request, 1});
  CheckedCall call = check(request, true);
  const ReduceOpTraits& reduction = traits_of(call.request.signature.reduce_op);
  if (reduction.declared) {
    throw Error(
        ErrorCode::kInvalidArgument,
        std::string(reduction.name) + " can be declared, but not prepared: it has no kernel");
  }
  calls_.prepare(call);
  return call;
}

// What is wrong with its input, or its place in a window. Marks when that has been produced.
Failure Submitter::fault_of(Prepared& prepared) {
  const Request& request = prepared.call->request;
  if (check_numerics_) {
    if (Failure unsound = numerics_of(request, prepared.submission(), own_)) return unsound;
  }
  if (prepared.call->submission.device == kCpuDevice) return {};
  try {
    const bool has_place = gpus_.window_range_of(request).window != 0;
    prepared.produced = gpus_.event_in(prepared.stream, has_place);
    return {};
  } catch (const Error& e) {
    return {e.code(), e.what()};
  }
}

// Peers' calls fail with the same text as an argument error, or a NaN before it can spread.
void Submitter::submit(std::span<Prepared> batch) {
  size_t sound = 0;
  Failure fault;
  while (sound < batch.size() && !(fault = fault_of(batch[sound]))) ++sound;
  std::exception_ptr error;
  try {
    calls_.submit(batch.first(sound));
    if (fault) {
      calls_.refuse({&batch[sound].call->request, 1}, fault);
      throw Error(fault.code, fault.text);
    }
  } catch (...) {
    error = std::current_exception();
  }
  driver_.after_submit();
  if (error) std::rethrow_exception(error);
}

void Submitter::refuse(const farandole_request& request, const Failure& why) {
  const Request name = name_of_request(request);
  calls_.refuse({&name, 1}, why);
  driver_.after_submit();
}

void Submitter::refuse(std::span<const farandole_request> requests, const Error& why,
                       bool free_only) {
  std::vector<Request> names;
  for (const farandole_request& request : requests) {
    names.push_back(name_of_request(request));
    if (request.group) names.back().group = request.group;
  }
  calls_.refuse(names, {why.code(), why.what()}, free_only);
}

}  // namespace farandole
