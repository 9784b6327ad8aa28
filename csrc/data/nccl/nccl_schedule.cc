// SPDX-License-Identifier: Apache-2.0
// See nccl_schedule.h. Used by NcclBackend; the driver only. It computes addresses and calls nothing.
#include "data/nccl/nccl_schedule.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "data/backend/backend.h"

namespace farandole {
namespace {

constexpr size_t kAlignment = 256;  // of scratch buffers
constexpr size_t kPackAlignment = 16;

cuda::Address address_of(const std::byte* pointer) {
  return static_cast<cuda::Address>(reinterpret_cast<uintptr_t>(pointer));
}

// The second place begins where the first ends: nothing but padding is between them.
bool are_neighbours(const Part& first, const Part& second) {
  const WindowRange &a = first.signature.window_range, &b = second.signature.window_range;
  return a.window == b.window &&
         round_up(a.offset + first.signature.bytes(), kPackAlignment) == b.offset;
}

NcclCall call_of(const Part& part, const NcclWire& wire, cuda::Address input, cuda::Address output,
                 size_t count) {
  const Rank target = part.signature.target();
  const auto kind = target < 0 ? NcclCall::Kind::kAllReduce : NcclCall::Kind::kReduce;
  return {kind, input, output, count, nccl_type(wire.type), wire.op, wire.weight, target};
}

}  // namespace

bool may_be_placed(const Part& part) {
  return part.signature.window_range.window != 0 &&
         std::ranges::all_of(part.present, [](bool present) { return present; });
}

void NcclSchedule::make(std::span<const Part> parts, cuda::Address scratch,
                        const Windows& windows) {
  pack.clear();
  unpack.clear();
  calls.clear();
  scratch_ = scratch;
  used_ = 0;
  std::vector<Reduction> allreduces, placed;
  for (const Part& part : parts) {
    switch (part.signature.traits().pattern) {
      case Pattern::kReduceToAll: {
        // By what all members know alike, as everything that decides which calls are made.
        const bool has_place =
            may_be_placed(part) && windows.contains(part.signature.window_range.window);
        const NcclWire wire = wire_of(part, members_, plain_sums_ || has_place);
        const bool in_place = has_place && wire.type == wire.element;
        (in_place ? placed : allreduces).push_back({&part, wire});
        break;
      }
      case Pattern::kReduceToOwners:
        plan_reducescatter({&part, wire_of(part, members_, plain_sums_)});
        break;
      case Pattern::kOneToAll: plan_broadcast(part); break;
      case Pattern::kEachToAll: plan_allgather(part); break;
      case Pattern::kEachToEach: plan_alltoall(part); break;
      case Pattern::kMeet: break;
      case Pattern::kNone: throw Error(ErrorCode::kInternal, "no such operation on a GPU");
    }
  }
  plan_placed(std::move(placed), windows);
  plan_allreduces(std::move(allreduces));
}

cuda::Address NcclSchedule::take(size_t bytes) {
  const cuda::Address address = scratch_ + used_;
  used_ += round_up(bytes, kAlignment);
  return address;
}

bool NcclSchedule::in_window(const std::byte* buffer) const {
  return buffer && open_windows_ && open_windows_->holds(address_of(buffer));
}

// Where NCCL may read a buffer: elsewhere if it lies in a window, though not at a place agreed upon.
cuda::Address NcclSchedule::read(const std::byte* input, size_t bytes) {
  if (!in_window(input)) return address_of(input);
  const cuda::Address copy = take(bytes);
  pack.copy(copy, address_of(input), bytes);
  return copy;
}

// Where NCCL may write it.
cuda::Address NcclSchedule::write(std::byte* output, size_t bytes) {
  if (!in_window(output)) return address_of(output);
  const cuda::Address copy = take(bytes);
  unpack.copy(address_of(output), copy, bytes);
  return copy;
}

// By shapes and factors alone: every member must make the same calls, whether or not it has buffers.
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
          return !goes_direct(other) && other.wire.same_call(first.wire) &&
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

// My input, or what changes no result, as NCCL's type.
void NcclSchedule::bring_in(const Reduction& one, cuda::Address target) {
  const NcclWire& wire = one.wire;
  if (one.part->input) {
    pack.convert(target, wire.type, address_of(one.part->input), wire.element, one.numbers(),
                 wire.factor_in, wire.divisor_in);
  } else {
    pack.fill_identity(target, wire.type, wire.identity, one.numbers());
  }
}

// A member whose tensor lies elsewhere, or that has none, brings it in: NCCL must meet registered memory at the
// same place on all members, or on none.
void NcclSchedule::plan_placed(std::vector<Reduction> reductions, const Windows& windows) {
  std::ranges::stable_sort(reductions, {}, [](const Reduction& one) {
    const WindowRange& range = one.part->signature.window_range;
    return std::pair(range.window, range.offset);
  });
  for (size_t i = 0; i < reductions.size(); ++i) {
    const Reduction& one = reductions[i];
    const Part& part = *one.part;
    const NcclWire& wire = one.wire;
    const cuda::Address at =
        windows.at(part.signature.window_range.window) + part.signature.window_range.offset;
    bring_in(one, at);
    if (part.output) {
      unpack.convert(address_of(part.output), wire.element, at, wire.type, one.numbers(),
                     wire.factor_out, wire.divisor_out);
    }
    const bool joins = i > 0 && are_neighbours(*reductions[i - 1].part, part) &&
                       reductions[i - 1].wire.same_call(wire);
    if (joins) {
      calls.back().count = (at - calls.back().input) / size_of(wire.type) + one.numbers();
    } else {
      calls.push_back({NcclCall::Kind::kAllReduce, at, at, one.numbers(), nccl_type(wire.type),
                       wire.op, wire.weight});
    }
  }
}

void NcclSchedule::plan_direct(const Reduction& one) {
  const NcclWire& wire = one.wire;
  const Part& part = *one.part;
  const size_t bytes = one.numbers() * size_of(wire.type);
  cuda::Address input = address_of(part.input);
  cuda::Address output = address_of(part.output);
  if (!part.input || wire.converts_in() || in_window(part.input)) {
    input = take(bytes);
    bring_in(one, input);
  }
  const bool through_scratch = !part.output || wire.type != wire.element || in_window(part.output);
  if (!gets_result(part.signature, member_)) {
    output = 0;
  } else if (through_scratch) {
    output = input == address_of(part.input) ? take(bytes) : input;
  }
  calls.push_back(call_of(part, wire, input, output, one.numbers()));
  if (part.output && (wire.converts_out() || output != address_of(part.output))) {
    unpack.convert(address_of(part.output), wire.element, output, wire.type, one.numbers(),
                   wire.factor_out, wire.divisor_out);
  }
}

void NcclSchedule::plan_packed(std::span<const Reduction> some) {
  const NcclWire& wire = some.front().wire;  // type and operator of all; other things may differ
  size_t bytes = 0;
  for (const Reduction& one : some) {
    bytes += round_up(one.numbers() * size_of(wire.type), kPackAlignment);
  }
  const cuda::Address buffer = take(bytes);
  cuda::Address at = buffer;
  for (const Reduction& one : some) {
    bring_in(one, at);
    if (one.part->output) {
      unpack.convert(address_of(one.part->output), one.wire.element, at, wire.type, one.numbers(),
                     one.wire.factor_out, one.wire.divisor_out);
    }
    at += round_up(one.numbers() * size_of(wire.type), kPackAlignment);
  }
  calls.push_back(call_of(*some.front().part, wire, buffer, buffer, bytes / size_of(wire.type)));
}

// Every share is made in scratch memory where it may not be written at once: types that differ, or an
// input that it overlaps.
void NcclSchedule::plan_reducescatter(const Reduction& one) {
  const NcclWire& wire = one.wire;
  const Part& part = *one.part;
  const size_t size = size_of(wire.type);
  const auto numbers_of = [&](int member) {
    return static_cast<size_t>(part.rows[static_cast<size_t>(member)]) *
           static_cast<size_t>(part.signature.row_elements()) * wire.per_element;
  };
  const size_t mine = numbers_of(member_);
  cuda::Address input = address_of(part.input);
  if (!part.input || wire.converts_in() || in_window(part.input)) {
    input = take(one.numbers() * size);
    bring_in(one, input);
  }
  const cuda::Address target = address_of(part.output);
  const bool overlaps = overlap(target, mine * size, input, one.numbers() * size);
  const bool through_scratch =
      !part.output || wire.type != wire.element || overlaps || in_window(part.output);
  const cuda::Address output = through_scratch ? take(mine * size) : target;
  const bool even = std::ranges::all_of(part.rows, [&](int64_t n) { return n == part.rows[0]; });
  if (even) {
    calls.push_back({NcclCall::Kind::kReduceScatter, input, output, mine, nccl_type(wire.type),
                     wire.op, wire.weight});
  }
  size_t before = 0;
  for (int member = 0; member < members_ && !even; ++member) {
    const size_t count = numbers_of(member);
    if (count > 0) {
      calls.push_back({NcclCall::Kind::kReduce, input + before * size,
                       member == member_ ? output : 0, count, nccl_type(wire.type), wire.op,
                       wire.weight, member});
    }
    before += count;
  }
  if (part.output && (through_scratch || wire.converts_out())) {
    unpack.convert(target, wire.element, output, wire.type, mine, wire.factor_out,
                   wire.divisor_out);
  }
}

void NcclSchedule::plan_broadcast(const Part& part) {
  const size_t bytes = part.signature.bytes();
  const bool root = part.signature.root == member_;
  const cuda::Address source = root ? read(part.input, bytes) : 0;
  cuda::Address output = write(part.output, bytes);
  if (!output) output = root ? source : take(bytes);
  const cuda::Address input = root ? source : output;
  calls.push_back({NcclCall::Kind::kBroadcast, input, output, bytes, nccl::kInt8, nccl::kSum, 1.0,
                   part.signature.root});
}

void NcclSchedule::plan_allgather(const Part& part) {
  const size_t row = part.signature.row_bytes();
  const auto rows = std::accumulate(part.rows.begin(), part.rows.end(), int64_t{0});
  const size_t mine = static_cast<size_t>(part.rows[static_cast<size_t>(member_)]) * row;
  const cuda::Address input = read(part.input, mine);
  cuda::Address output = write(part.output, static_cast<size_t>(rows) * row);
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
  cuda::Address input = read(part.input, layout.input_bytes(member_));
  cuda::Address output = write(part.output, received);
  if (!output) output = take(received);
  for (int peer = 0; peer < members_; ++peer) {
    const size_t gives = layout.bytes_between(member_, peer);
    const size_t gets = layout.bytes_between(peer, member_);
    if (gives > 0) {
      calls.push_back({NcclCall::Kind::kSend, input, 0, gives, nccl::kInt8, nccl::kSum, 1.0, peer});
    }
    if (gets > 0) {
      calls.push_back(
          {NcclCall::Kind::kReceive, 0, output, gets, nccl::kInt8, nccl::kSum, 1.0, peer});
    }
    input += gives;
    output += gets;
  }
}

}  // namespace farandole
