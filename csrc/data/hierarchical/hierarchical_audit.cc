// SPDX-License-Identifier: Apache-2.0
#include "data/hierarchical/hierarchical_audit.h"

#include <algorithm>
#include <utility>

#include "kernels/kernels.h"

namespace farandole {
namespace {

DType dtype_of_sums(const Part& part) {
  const Signature& s = part.signature;
  return kernels::partial_dtype(s.dtype, s.reduce_op, factors_of(part));
}

}  // namespace

HierarchicalAudit::HierarchicalAudit(Audit::Setup setup, const HostMap& hosts, std::byte* memory,
                                     size_t block_bytes)
    : hosts_(hosts),
      member_(setup.member),
      host_(hosts.host_of(setup.member)),
      locals_(hosts.members_of(host_)),
      memory_(memory),
      block_bytes_(block_bytes),
      audit_(std::move(setup)) {}

void HierarchicalAudit::start(std::span<const Part> parts, uint64_t first,
                              const HierarchicalSchedule& plan) {
  parts_ = parts;
  audit_.start(parts, first, plan, HierarchicalBlock{}, [](const HierarchicalBlock& block) {
    return std::ranges::any_of(block.chunks, &Chunk::reduces);
  });
}

void HierarchicalAudit::keep_inputs(const HierarchicalBlock& block) const {
  for (const Chunk& chunk : block.chunks) {
    if (!chunk.reduces()) continue;
    for (const Piece& piece : block.of(chunk)) {
      const Part& part = parts_[piece.part];
      if (!part.has(member_)) continue;
      kernels::copy(inputs(chunk, member_) + piece.packed, part.input + piece.input, piece.bytes);
    }
  }
}

void HierarchicalAudit::keep_sum(const BlockTransfer& f, const BlockTransfer::Job& job) const {
  const Chunk& chunk = f.block.chunks[job.chunk];
  if (chunk.reduces()) kernels::copy(sums(chunk), f.arena.data() + job.partial, chunk.wide_bytes);
}

void HierarchicalAudit::keep_result(const BlockTransfer& f, const BlockTransfer::Job& job) const {
  const Chunk& chunk = f.block.chunks[job.chunk];
  if (!chunk.reduces()) return;
  kernels::copy(results(chunk), f.arena.data() + job.result, chunk.packed_bytes);
}

void HierarchicalAudit::check_combined(const BlockTransfer& f, const BlockTransfer::Job& job,
                                       const std::byte* again) const {
  for (const Piece& piece : f.block.of(f.block.chunks[job.chunk])) {
    const DType dtype = parts_[piece.part].signature.dtype;
    audit_.compare({piece.part, piece.output / size_of(dtype), dtype, piece.bytes, member_,
                    "the sum of all hosts' sums"},
                   f.arena.data() + job.result + piece.packed, again + piece.packed);
  }
}

void HierarchicalAudit::check(const HierarchicalBlock& block) {
  for (const Chunk& chunk : block.chunks) {
    if (!chunk.reduces()) continue;
    if (audits_sum(chunk)) check_sum(block, chunk);
    check_result(block, chunk);
  }
  audit_.finish();
}

// The reducer's neighbour.
bool HierarchicalAudit::audits_sum(const Chunk& chunk) const {
  const auto next = static_cast<size_t>(hosts_.local_of(chunk.reducer(hosts_, host_))) + 1;
  return locals_[next % locals_.size()] == member_;
}

void HierarchicalAudit::check_sum(const HierarchicalBlock& block, const Chunk& chunk) {
  for (const Piece& piece : block.of(chunk)) {
    const Part& part = parts_[piece.part];
    if (!host_has(part, hosts_, host_)) continue;
    scratch_.clear();
    for (int member : locals_) {
      if (part.has(member)) scratch_.push_back(inputs(chunk, member) + piece.packed);
    }
    const Signature& s = part.signature;
    const DType wide = dtype_of_sums(part);
    const size_t count = piece.bytes / size_of(s.dtype);
    again_.resize(std::max(again_.size(), count * size_of(wide)));
    kernels::reduce_to_partial(s.dtype, s.reduce_op, again_.data(), scratch_.data(),
                               static_cast<int>(scratch_.size()), count, factors_of(part),
                               kernels::Loops::kScalar);
    audit_.compare({piece.part, piece.input / size_of(s.dtype), wide, count * size_of(wide),
                    chunk.reducer(hosts_, host_), "the sum of its host's inputs, looked at"},
                   sums(chunk) + piece.wide, again_.data());
  }
}

void HierarchicalAudit::check_result(const HierarchicalBlock& block, const Chunk& chunk) const {
  if (chunk.receiver != Chunk::kAll && chunk.receiver != member_) return;
  for (const Piece& piece : block.of(chunk)) {
    const Part& part = parts_[piece.part];
    if (part.output == nullptr) continue;
    const DType dtype = part.signature.dtype;
    audit_.compare({piece.part, piece.output / size_of(dtype), dtype, piece.bytes,
                    chunk.combiner(hosts_, host_), "the result"},
                   part.output + piece.output, results(chunk) + piece.packed);
  }
}

}  // namespace farandole
