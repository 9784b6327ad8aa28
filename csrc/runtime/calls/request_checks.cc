// SPDX-License-Identifier: Apache-2.0
#include "runtime/calls/request_checks.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "base/abi.h"
#include "base/error.h"
#include "data/backend/backend.h"
#include "kernels/kernels.h"
#include "runtime/calls/memory_in_use.h"

namespace farandole {

std::string title_of(const Request& request) {
  const std::string name = request.name.empty() ? "unnamed" : "'" + request.name + "'";
  return std::string(name_of(request.signature.op)) + " " + name;
}

namespace {

constexpr int32_t kMaxDimensions = 64;
constexpr size_t kMaxName = 4096;

[[noreturn]] void refuse(const Request& request, const std::string& why,
                         ErrorCode code = ErrorCode::kInvalidArgument) {
  throw Error(code, title_of(request) + ": " + why);
}

template <class E>
E checked(const Request& request, int32_t value, int32_t count, const char* what) {
  if (value < 0 || value >= count) {
    refuse(request, std::string("unknown ") + what + " " + std::to_string(value));
  }
  return static_cast<E>(value);
}

void check_shape(const Request& request, const Dimensions& shape) {
  int64_t bytes = static_cast<int64_t>(size_of(request.signature.dtype));
  for (int64_t n : shape) {
    if (n < 0) refuse(request, "negative length in shape " + text_of(shape));
    if (n > 0 && __builtin_mul_overflow(bytes, n, &bytes)) {
      refuse(request, "shape " + text_of(shape) + " is too large");
    }
  }
  if (request.signature.traits().needs_rows() && shape.empty()) {
    refuse(request, "a scalar has no first dimension to divide; give it shape (1,)");
  }
}

// A reduce op that is only `declared` is allowed only in an allreduce that passes no data.
void check_reduction(const Request& request, bool brings_nothing) {
  const Signature& s = request.signature;
  if (!s.traits().reduces()) return;
  if (s.device != kCpuDevice && !traits_of(s.dtype).reduces_on_gpus()) {
    refuse(request,
           std::string(name_of(s.dtype)) +
               " is not reduced on GPUs; convert it to bfloat16, or reduce a copy on the CPU",
           ErrorCode::kWrongType);
  }
  if (kernels::supports(s.dtype, s.reduce_op)) return;
  if (traits_of(s.reduce_op).declared && s.op == Op::kAllreduce && brings_nothing) return;
  refuse(request,
         std::string(name_of(s.reduce_op)) + " of " + name_of(s.dtype) + " is not defined" +
             (!traits_of(s.dtype).takes_factors()
                  ? "; use Max for 'any' and Min for 'all', or convert to int32"
                  : ""),
         ErrorCode::kWrongType);
}

void check_factors(const Request& request) {
  const Signature& s = request.signature;
  bool scaled = s.prescale != 1.0 || s.postscale != 1.0;
  if (scaled && !traits_of(s.dtype).takes_factors()) {
    refuse(request, std::string(name_of(s.dtype)) + " can't be scaled", ErrorCode::kWrongType);
  }
  if (std::isnan(s.prescale) || std::isnan(s.postscale)) {
    refuse(request, "a factor is NaN: prescale " + std::to_string(s.prescale) + ", postscale " +
                        std::to_string(s.postscale));
  }
}

std::vector<int64_t> splits_of(const Request& request, const farandole_request& raw,
                               const ProcessSet& set, int64_t rows) {
  auto members = static_cast<size_t>(set.members());
  if (raw.n_splits == 0) {
    if (rows % set.members() != 0) {
      refuse(request, "without splits, the first dimension (" + std::to_string(rows) +
                          ") must be a multiple of the set size, " + std::to_string(set.members()));
    }
    return std::vector<int64_t>(members, rows / set.members());
  }
  std::vector<int64_t> splits(raw.splits, raw.splits + raw.n_splits);
  if (splits.size() != members) {
    refuse(request, "splits has " + std::to_string(splits.size()) + " entries for " +
                        std::to_string(set.members()) + " ranks");
  }
  int64_t sum = 0;
  for (int64_t n : splits) {
    if (n < 0 || n > rows - sum) {
      refuse(request,
             "splits " + text_of(splits) + " do not fit in " + std::to_string(rows) + " rows");
    }
    sum += n;
  }
  return splits;
}

void check_change(const Request& request, Rank own) {
  const Signature& s = request.signature;
  if (request.set != kWorldSet) refuse(request, "this call must be made in process set 0");
  if (!by_members(request)) return;
  if (request.name.empty()) refuse(request, "a call that only the members make needs a name");
  if (std::ranges::count(s.shape, own) == 0) {
    refuse(request, "rank " + std::to_string(own) + " is not among " + text_of(s.shape));
  }
}

// Fills in and checks the arguments of a send or receive.
void check_message(CheckedCall& taken, const ProcessSet& set, Rank own) {
  Request& request = taken.request;
  Signature& s = request.signature;
  Submission& mine = taken.submission;
  const bool sends = s.traits().end == End::kSender;
  if (request.peer == own) {
    refuse(request, "rank " + std::to_string(own) + " can't send to itself; copy the tensor");
  }
  const bool any = request.peer == kAnyRank && !sends;
  if (!any && set.member_of(request.peer) < 0) {
    refuse(request,
           "rank " + std::to_string(request.peer) + " is not among " + text_of_ranks(set.ranks));
  }
  if (request.tag < 0) refuse(request, "tag " + std::to_string(request.tag) + " is negative");
  if (sends ? mine.output : mine.input) refuse(request, "a message has one buffer, not two");
  s.shape = mine.shape;
  const int64_t elements = s.elements();
  s.shape = mine.shape = Dimensions({&elements, 1});  // the two ends may have different shapes
  s.root = sends ? own : request.peer;
}

}  // namespace

Request name_of_request(const farandole_request& raw) {
  Request request;
  request.set = raw.process_set;
  if (raw.name) request.name = raw.name;
  request.alone = raw.by_members != 0;
  if (raw.op >= 0 && raw.op < kOpCount) request.signature.op = static_cast<Op>(raw.op);
  if (by_members(request) && raw.ndim > 0) {
    request.signature.shape = Dimensions({raw.shape, static_cast<size_t>(raw.ndim)});
  }
  if (request.signature.traits().paired()) {
    request.peer = raw.root;
    request.tag = raw.tag;
  }
  return request;
}

const ProcessSet& working_set(const Request& request, ProcessSets& sets) {
  if (is_pair(request.set)) refuse(request, "the number of a process set can't be negative");
  const ProcessSet& set = sets.own(request.set);
  if (set.joined()) refuse(request, "this rank has joined; wait for join() to return");
  return set;
}

namespace {

CheckedCall check_request(const farandole_request& raw, const ProcessSet& set, Rank own) {
  CheckedCall taken;
  Request& request = taken.request = name_of_request(raw);
  Signature& s = request.signature;
  s.op = checked<Op>(request, raw.op, kOpCount, "operation");
  s.reduce_op = checked<ReduceOp>(request, raw.reduce_op, kReduceOpCount, "reduce op");
  s.dtype = checked<DType>(request, raw.dtype, kDTypeCount, "dtype");
  const CollectiveTraits& traits = s.traits();
  if (raw.device < kCpuDevice) refuse(request, "no such device");
  s.device = raw.device == kCpuDevice ? kCpuDevice : kAnyGpu;
  if (raw.site) taken.site = raw.site;
  if (request.name.size() > kMaxName) refuse(request, "the name is longer than 4096 bytes");
  if (taken.site.size() > kMaxName) refuse(request, "the site is longer than 4096 bytes");
  if (raw.ndim < 0 || (!traits.changes_sets && raw.ndim > kMaxDimensions)) {
    refuse(request, "more than 64 dimensions");
  }
  if (raw.n_splits < 0) refuse(request, "a negative number of splits");
  const bool by_order = request.name.empty() && traits.made_by_all_alike();
  if (by_order && !raw.any_site) request.site = taken.site;
  Submission& mine = taken.submission;
  mine.shape = Dimensions({raw.shape, static_cast<size_t>(raw.ndim)});
  mine.input = static_cast<const std::byte*>(raw.input);
  mine.output = static_cast<std::byte*>(raw.output);
  mine.device = raw.device;
  request.alone = request.alone && traits.changes_sets;
  s.root = traits.root == Root::kNone ? -1 : raw.root;
  if (traits.reduces()) {
    s.prescale = raw.prescale;
    s.postscale = raw.postscale;
  } else {
    s.reduce_op = ReduceOp::kSum;
  }

  if (!traits.moves_bytes()) {
    s.shape = mine.shape;
    if (traits.changes_sets) {
      check_change(request, own);
    } else {
      check_shape(request, mine.shape);
    }
    return taken;
  }
  check_shape(request, mine.shape);
  check_reduction(request, !mine.input);
  check_factors(request);
  if (traits.paired()) {
    check_message(taken, set, own);
    return taken;
  }
  if (traits.rooted() && set.member_of(s.root) < 0) {
    refuse(request,
           "root rank " + std::to_string(s.root) + " is not among " + text_of_ranks(set.ranks));
  }
  if (traits.rooted() && s.root == own && !mine.input) {
    refuse(request, "the root has passed no tensor");
  }
  s.shape = mine.shape;
  if (traits.ragged()) s.shape[0] = -1;
  if (traits.splits() && brings_input(s, own)) {
    mine.splits = splits_of(request, raw, set, mine.shape[0]);
  }
  return taken;
}

void check_in_group(const Request& request) {
  const CollectiveTraits& traits = request.signature.traits();
  if (!traits.moves_bytes() || traits.paired()) refuse(request, "it can't be part of a group");
}

void check_together(const Request& first, const Request& other) {
  if (other.set != first.set) {
    refuse(first, "all tensors of a group must use the same process set, but these use " +
                      std::to_string(first.set) + " and " + std::to_string(other.set) +
                      "; make a call for each set");
  }
  if (other.signature.device != first.signature.device) {
    refuse(first,
           "a group's tensors must be all on the CPU, or all on the GPU; make a group for each");
  }
}

}  // namespace

CheckedCall check_call(std::span<const farandole_request> raw, size_t count, const ProcessSet& set,
                       Rank own) {
  CheckedCall call = check_request(raw.front(), set, own);
  call.request.no_tensors = count == 0;
  if (count == 0 && call.request.signature.op != Op::kBarrier) {
    refuse(call.request, "a group without tensors must be a barrier");
  }
  if (count > 1) check_in_group(call.request);
  for (const farandole_request& each : raw.subspan(1)) {
    CheckedCall one = check_request(each, set, own);
    check_in_group(one.request);
    check_together(call.request, one.request);
    call.request.more.push_back(one.request.signature);
    call.submission.more.push_back(std::move(one.submission));
  }
  return call;
}

void check_buffers(const Request& request, size_t part, const Submission& mine,
                   const ProcessSet& set) {
  const Signature& s = request.part(part);
  const CollectiveTraits& traits = s.traits();
  if (traits.reduces() && mine.input && traits_of(s.reduce_op).declared) {
    refuse(request, std::string(name_of(s.reduce_op)) + " has no kernel; pass no input");
  }
  if (traits.paired() && !(traits.end == End::kSender ? mine.input : mine.output)) {
    refuse(request, "a message needs a tensor");
  }
  if (!traits.moves_bytes() || !mine.input || !mine.output) return;
  if (traits.splits() && mine.splits.empty()) return;  // this input is not read
  if (traits.in_place() && mine.input == mine.output) return;
  const auto [brought, kept] = sizes_of(s, mine, set);
  if (!overlap(mine.input, brought, mine.output, kept)) return;
  // In an allgather, the input may lie at its place in the result.
  if (traits.rows == Rows::kBrought && mine.input > mine.output) return;
  refuse(request, traits.in_place()
                      ? "input and output overlap partly; pass one buffer for both, or two apart"
                      : "input and output overlap; pass two buffers that do not overlap");
}

Contribution contribution_of(const Signature& s, const Submission& mine, Rank own,
                             size_t most_payload) {
  Contribution given;
  given.has_input = mine.input && brings_input(s, own);
  if (s.traits().ragged()) given.rows = given.has_input ? mine.shape[0] : 0;
  if (!given.has_input) return given;
  given.splits = mine.splits;
  if (s.device != kCpuDevice) return given;  // the host cannot read GPU memory
  if (!s.traits().rides_along) return given;
  size_t bytes = std::accumulate(mine.shape.begin(), mine.shape.end(), size_of(s.dtype),
                                 [](size_t a, int64_t n) { return a * static_cast<size_t>(n); });
  given.has_payload = bytes <= most_payload;
  if (given.has_payload) given.payload = {mine.input, bytes};
  return given;
}

Failure numerics_of(const Request& request, size_t part, const Submission& submission, Rank own) {
  const Signature& signature = request.part(part);
  const bool here = signature.device == kCpuDevice && signature.traits().moves_bytes();
  if (!brings_input(signature, own) || !here || submission.input == nullptr) return {};
  size_t elements = 1;
  for (int64_t n : submission.shape) elements *= static_cast<size_t>(n);
  const size_t bad = kernels::first_not_finite(signature.dtype, submission.input, elements);
  if (bad == elements) return {};
  return {ErrorCode::kInvalidArgument,
          title_of(request) + ": the input of rank " + std::to_string(own) +
              " holds NaN or infinity, first at element " + std::to_string(bad) + " of " +
              std::to_string(elements) + " (FARANDOLE_CHECK_NUMERICS=1 enables this check)"};
}

}  // namespace farandole
