// SPDX-License-Identifier: Apache-2.0
#include "data/hierarchical/hierarchical_worker.h"

#include "kernels/kernels.h"

namespace farandole {

HierarchicalWorker::HierarchicalWorker(const HostMap& hosts, int member, std::byte* memory,
                                       uint64_t slots, size_t block_bytes)
    : hosts_(hosts),
      member_(member),
      host_(hosts.host_of(member_)),
      locals_(hosts.members_of(host_)),
      memory_(memory),
      slots_(slots),
      block_bytes_(block_bytes),
      inputs_(static_cast<size_t>(hosts.members())) {}

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
}

// Copies to the slot the bytes that other members of this host read. Copies to the output the bytes for this member.
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
  for (const BlockTransfer::ChunkTask& task : f.tasks) {
    if (task.reduces) reduce_chunk(block, f, task);
  }
}

void HierarchicalWorker::reduce_chunk(uint64_t block, BlockTransfer& f,
                                      const BlockTransfer::ChunkTask& task) {
  const Chunk& chunk = f.block.chunks[task.chunk];
  std::byte* const to = f.arena.data() + task.partial;
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

void HierarchicalWorker::combine(BlockTransfer& f) {
  // Skips chunks without reduction, because the message received for such a chunk is already the result.
  for (const BlockTransfer::ChunkTask& task : f.tasks) {
    if (task.combines && f.block.chunks[task.chunk].reduces()) combine_chunk(f, task);
  }
}

void HierarchicalWorker::combine_chunk(BlockTransfer& f, const BlockTransfer::ChunkTask& task) {
  const Chunk& chunk = f.block.chunks[task.chunk];
  std::byte* const arena = f.arena.data();
  for (const Piece& piece : f.block.of(chunk)) {
    const Part& part = parts_[piece.part];
    int present = 0;
    size_t message = task.first_in;
    for (int host = 0; host < hosts_.hosts(); ++host) {  // messages are in host order
      size_t partial = task.partial;
      if (host != host_) {
        if (message == task.last_in) continue;
        const Message& in = f.partials_in.messages()[message];
        if (hosts_.host_of(in.peer) != host) continue;
        partial = in.offset;
        ++message;
      }
      if (!host_has(part, hosts_, host)) continue;
      inputs_[static_cast<size_t>(present++)] = arena + partial + piece.wide;
    }
    const Signature& s = part.signature;
    kernels::reduce_partials(s.dtype, s.reduce_op, arena + task.result + piece.packed,
                             inputs_.data(), present, piece.bytes / size_of(s.dtype),
                             factors_of(part));
  }
}

void HierarchicalWorker::publish(uint64_t block, const BlockTransfer& f) const {
  if (locals_.size() == 1) return;
  for (const BlockTransfer::ChunkTask& task : f.tasks) {
    if (!task.combines && !task.relays) continue;
    const Chunk& chunk = f.block.chunks[task.chunk];
    kernels::copy(published(block, member_, chunk), f.arena.data() + task.result,
                  chunk.packed_bytes);
  }
}

// A member that is alone on its host reads results in its arena; other members read them in shared memory.
void HierarchicalWorker::consume(uint64_t block, const BlockTransfer& f) const {
  if (locals_.size() == 1) {
    for (const BlockTransfer::ChunkTask& task : f.tasks) {
      if (!task.combines && !task.relays) continue;  // the result is not for this member
      consume_chunk(f, f.block.chunks[task.chunk], f.arena.data() + task.result);
    }
    return;
  }
  for (const Chunk& chunk : f.block.chunks) {
    const bool for_me = chunk.receiver == Chunk::kAll || chunk.receiver == member_;
    if (!for_me || chunk.sender == member_) continue;
    consume_chunk(f, chunk,
                  chunk.needed_on(hosts_, host_)
                      ? published(block, chunk.combiner(hosts_, host_), chunk)
                      : staged(block, chunk.sender, chunk));
  }
}

void HierarchicalWorker::consume_chunk(const BlockTransfer& f, const Chunk& chunk,
                                       const std::byte* from) const {
  for (const Piece& piece : f.block.of(chunk)) {
    std::byte* const output = parts_[piece.part].output;
    if (output != nullptr) kernels::copy(output + piece.output, from + piece.packed, piece.bytes);
  }
}

}  // namespace farandole
