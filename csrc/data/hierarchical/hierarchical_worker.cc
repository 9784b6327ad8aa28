// SPDX-License-Identifier: Apache-2.0
#include "data/hierarchical/hierarchical_worker.h"

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

HierarchicalWorker::HierarchicalWorker(const HostMap& hosts, std::byte* memory, uint64_t slots,
                                       size_t block_bytes, Audit::Setup audit)
    : hosts_(hosts),
      member_(audit.member),
      host_(hosts.host_of(member_)),
      locals_(hosts.members_of(host_)),
      memory_(memory),
      slots_(slots),
      block_bytes_(block_bytes),
      audit_(std::move(audit), hosts,
             memory + slot_bytes(static_cast<int>(locals_.size()), block_bytes, slots),
             block_bytes),
      inputs_(static_cast<size_t>(hosts.members())) {}

void HierarchicalWorker::start(std::span<const Part> parts, uint64_t first,
                               const HierarchicalSchedule& plan) {
  parts_ = parts;
  audit_.start(parts, first, plan);
}

std::byte* HierarchicalWorker::slot(uint64_t block, int member) const {
  const uint64_t index = static_cast<uint64_t>(hosts_.local_of(member)) * slots_ + block % slots_;
  return memory_ + index * 2 * block_bytes_;
}

std::byte* HierarchicalWorker::staged(uint64_t block, int member, const Chunk& chunk) const {
  return slot(block, member) + chunk.begin;
}

std::byte* HierarchicalWorker::published(uint64_t block, int member, const Chunk& chunk) const {
  return slot(block, member) + block_bytes_ + chunk.begin;
}

void HierarchicalWorker::stage(uint64_t block, const BlockTransfer& f) const {
  for (const Chunk& chunk : f.block.chunks) stage_chunk(block, f, chunk);
  if (audit_.chosen(block)) audit_.keep_inputs(f.block);
}

// Copies only what members on this host read, and what this member sends to itself.
void HierarchicalWorker::stage_chunk(uint64_t block, const BlockTransfer& f,
                                     const Chunk& chunk) const {
  const bool mine = chunk.sender == member_;
  const bool to_all = chunk.receiver == Chunk::kAll;
  const bool keeps = mine && (to_all || chunk.receiver == member_);
  const bool shows =
      chunk.reduces() ? chunk.reducer(hosts_, host_) != member_
      : to_all ? mine && locals_.size() > 1
               : mine && chunk.receiver != member_ && hosts_.host_of(chunk.receiver) == host_;
  if (!keeps && !shows) return;
  std::byte* const to = staged(block, member_, chunk);
  for (const Piece& piece : f.block.of(chunk)) {
    const Part& part = parts_[piece.part];
    if (!part.has(member_)) continue;
    const std::byte* const input = part.input + piece.input;
    if (shows) kernels::copy(to + piece.packed, input, piece.bytes);
    const bool elsewhere = part.output != nullptr && part.output + piece.output != input;
    if (keeps && elsewhere) kernels::copy(part.output + piece.output, input, piece.bytes);
  }
}

void HierarchicalWorker::reduce(uint64_t block, BlockTransfer& f) {
  for (const BlockTransfer::Job& job : f.jobs) {
    if (!job.reduces) continue;
    reduce_chunk(block, f, job);
    if (audit_.chosen(block)) audit_.keep_sum(f, job);
  }
}

void HierarchicalWorker::reduce_chunk(uint64_t block, BlockTransfer& f,
                                      const BlockTransfer::Job& job) {
  const Chunk& chunk = f.block.chunks[job.chunk];
  std::byte* const to = f.arena.data() + job.partial;
  for (const Piece& piece : f.block.of(chunk)) {
    const Part& part = parts_[piece.part];
    const auto input = [&](int member) {
      return member == member_ ? part.input + piece.input
                               : staged(block, member, chunk) + piece.packed;
    };
    if (!chunk.reduces()) {
      kernels::copy(to + piece.wide, input(chunk.sender), piece.bytes);
      continue;
    }
    int present = 0;
    for (int member : locals_) {
      if (part.has(member)) inputs_[static_cast<size_t>(present++)] = input(member);
    }
    if (present == 0) continue;
    const Signature& s = part.signature;
    kernels::reduce_to_partial(s.dtype, s.reduce_op, to + piece.wide, inputs_.data(), present,
                               piece.bytes / size_of(s.dtype), factors_of(part));
  }
}

void HierarchicalWorker::combine(uint64_t block, BlockTransfer& f) {
  for (const BlockTransfer::Job& job : f.jobs) {
    const Chunk& chunk = f.block.chunks[job.chunk];
    if (!job.combines || !chunk.reduces()) continue;  // else the message is the result
    combine_chunk(f, job, f.arena.data() + job.result, kernels::Loops::kChosen);
    if (!audit_.chosen(block)) continue;
    again_.resize(std::max(again_.size(), chunk.packed_bytes));
    combine_chunk(f, job, again_.data(), kernels::Loops::kScalar);
    audit_.check_combined(f, job, again_.data());
  }
}

void HierarchicalWorker::combine_chunk(const BlockTransfer& f, const BlockTransfer::Job& job,
                                       std::byte* result, kernels::Loops loops) {
  const Chunk& chunk = f.block.chunks[job.chunk];
  const std::byte* const arena = f.arena.data();
  for (const Piece& piece : f.block.of(chunk)) {
    const Part& part = parts_[piece.part];
    int present = 0;
    size_t message = job.first_in;
    for (int host = 0; host < hosts_.hosts(); ++host) {  // messages are in host order
      size_t partial = job.partial;
      if (host != host_) {
        if (message == job.last_in) continue;
        const Message& in = f.partials_in.messages()[message];
        if (hosts_.host_of(in.peer) != host) continue;
        partial = in.offset;
        ++message;
      }
      if (!host_has(part, hosts_, host)) continue;
      inputs_[static_cast<size_t>(present++)] = arena + partial + piece.wide;
    }
    const Signature& s = part.signature;
    kernels::reduce_partials(s.dtype, s.reduce_op, result + piece.packed, inputs_.data(), present,
                             piece.bytes / size_of(s.dtype), factors_of(part), loops);
  }
}

void HierarchicalWorker::publish(uint64_t block, const BlockTransfer& f) const {
  for (const BlockTransfer::Job& job : f.jobs) {
    if (!job.combines && !job.relays) continue;
    const Chunk& chunk = f.block.chunks[job.chunk];
    kernels::copy(published(block, member_, chunk), f.arena.data() + job.result,
                  chunk.packed_bytes);
    if (audit_.chosen(block)) audit_.keep_result(f, job);
  }
}

void HierarchicalWorker::consume(uint64_t block, const BlockTransfer& f) {
  for (const Chunk& chunk : f.block.chunks) consume_chunk(block, f, chunk);
  if (audit_.chosen(block)) audit_.check(f.block);
}

void HierarchicalWorker::consume_chunk(uint64_t block, const BlockTransfer& f,
                                       const Chunk& chunk) const {
  const bool for_me = chunk.receiver == Chunk::kAll || chunk.receiver == member_;
  if (!for_me || chunk.sender == member_) return;
  const std::byte* const from = chunk.needed_on(hosts_, host_)
                                    ? published(block, chunk.combiner(hosts_, host_), chunk)
                                    : staged(block, chunk.sender, chunk);
  for (const Piece& piece : f.block.of(chunk)) {
    std::byte* const output = parts_[piece.part].output;
    if (output != nullptr) kernels::copy(output + piece.output, from + piece.packed, piece.bytes);
  }
}

}  // namespace farandole
