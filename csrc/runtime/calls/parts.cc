// SPDX-License-Identifier: Apache-2.0
#include "runtime/calls/parts.h"

#include <algorithm>
#include <utility>

#include "kernels/kernels.h"

namespace farandole {

bool fits_cell(const Signature& signature, const Submission& mine, const ProcessSet& set) {
  const CollectiveTraits& traits = signature.traits();
  if (traits.pattern == Pattern::kMeet) return true;
  const bool known = traits.pattern != Pattern::kNone && traits.pattern != Pattern::kEachToEach;
  const bool sends = !traits.from_root() || set.member_of(signature.root) == set.member;
  const bool receives = !traits.to_root() || set.member_of(signature.root) == set.member;
  const uint64_t bytes = mine.recorded.bytes;
  return known && !traits.paired() && mine.device == kCpuDevice && bytes > 0 &&
         bytes <= Cell::most_bytes(set.members()) && (mine.input || !sends) &&
         (mine.output || !receives);
}

std::span<const std::byte> input_in_cell(const Part& part, int member) {
  const bool none = !part.signature.traits().moves_bytes() ||
                    (part.signature.traits().from_root() && part.signature.root != member);
  return {part.input, none ? 0 : part.signature.bytes()};
}

void complete(const Part& part, const ProcessSet& set, const Cell& cell) {
  const Signature& signature = part.signature;
  const Pattern pattern = signature.traits().pattern;
  const size_t bytes = signature.bytes();  // size of one input
  if (part.output == nullptr || pattern == Pattern::kMeet) return;
  if (pattern == Pattern::kEachToAll) {
    for (int member = 0; member < set.members(); ++member) {
      kernels::copy(part.output + static_cast<size_t>(member) * bytes, cell.input_of(member),
                    bytes);
    }
    return;
  }
  if (pattern == Pattern::kOneToAll) {
    const auto root = static_cast<int>(signature.root);
    const std::byte* input = root == set.member ? part.input : cell.input_of(root);
    if (part.output != input) kernels::copy(part.output, input, bytes);
    return;
  }
  const bool shared = pattern == Pattern::kReduceToOwners;
  const PartLayout layout(part, set.members());
  const size_t start = shared ? layout.share_start(set.member) : 0;
  const size_t reduced = shared ? layout.share_bytes(set.member) : bytes;
  std::vector<const void*> inputs;
  for (int member = 0; member < set.members(); ++member) {
    inputs.push_back((member == set.member ? part.input : cell.input_of(member)) + start);
  }
  kernels::reduce(signature.dtype, signature.reduce_op, part.output, inputs.data(), set.members(),
                  reduced / size_of(signature.dtype), factors_of(part));
}

Part part_of(const PartInputs& inputs, const Signature& signature, const ProcessSet& set,
             const Submission* mine) {
  Part part;
  part.signature = signature;
  part.divisor = divisor_of(signature.reduce_op, set.members());
  part.rows = rows_of(inputs.rows, signature, set.members());
  if (signature.traits().rooted()) part.signature.root = set.member_of(signature.root);
  if (!inputs.absent.empty()) {
    part.present.assign(static_cast<size_t>(set.members()), true);
    for (int32_t m : inputs.absent) part.present[static_cast<size_t>(m)] = false;
  }
  if (mine) {
    part.input = mine->input;
    part.output = mine->output;
    part.produced = mine->produced;
    part.signature.shape = mine->shape;
  } else if (!part.signature.shape.empty() && part.signature.shape[0] < 0) {
    part.signature.shape[0] = 0;
  }
  return part;
}

std::vector<Item> items_of(const Run& run) {
  std::vector<Item> items = run.items;
  items.reserve(items.size() + run.plain.size());
  run.plain.for_each([&](uint32_t id) { items.push_back(Item{id}); });
  return items;
}

std::string label_of(uint64_t bucket, std::span<const Item> items, const PendingTable& pending) {
  constexpr size_t kNames = 8;
  std::string label = "bucket " + std::to_string(bucket);
  const size_t shown = std::min(items.size(), kNames);
  for (size_t i = 0; i < shown; ++i) {
    const std::string& name = pending.request_of(items[i].id).name;
    label += (i == 0 ? ": " : ", ") + (name.empty() ? "unnamed" : name);
  }
  const size_t left = items.size() - shown;
  return left == 0 ? label : label + " and " + std::to_string(left) + " more";
}

Outcome outcome_of(const Signature& signature, const std::vector<int64_t>& rows,
                   const ProcessSet& set, Submission& mine,
                   const std::shared_ptr<GpuDevice>& device) {
  const bool on_gpu = mine.device != kCpuDevice;
  Outcome outcome = outcome_of(signature, rows, set.member, set.members(), std::move(mine.shape),
                               mine.output, on_gpu ? device : nullptr);
  outcome.value = mine.value;
  return outcome;
}

}  // namespace farandole
