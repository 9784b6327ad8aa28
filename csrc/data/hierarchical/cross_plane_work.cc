// SPDX-License-Identifier: Apache-2.0
// What each phase does to the bytes of a block.
#include "data/hierarchical/cross_plane.h"
#include "kernels/kernels.h"

namespace farandole {

std::byte* CrossPlane::slot(uint64_t block, int member) const {
  const uint64_t index = static_cast<uint64_t>(hosts_.local_of(member)) * slots_ + block % slots_;
  return memory_ + index * 2 * sizes_.block_bytes;
}

std::byte* CrossPlane::staged(uint64_t block, int member, const Chunk& chunk) const {
  return slot(block, member) + chunk.begin;
}

std::byte* CrossPlane::published(uint64_t block, int member, const Chunk& chunk) const {
  return slot(block, member) + sizes_.block_bytes + chunk.begin;
}

void CrossPlane::stage() {
  Flight& f = flight(staged_);
  if (f.arena.size() < f.arena_bytes) f.arena.resize(f.arena_bytes);
  f.partials_in.receive_all(*wire_, Wire::Channel::kPartial, f.arena.data());
  f.results_in.receive_all(*wire_, Wire::Channel::kResult, f.arena.data());
  for (const Chunk& chunk : f.block.chunks) stage_chunk(f, chunk);
  store(&HostProgress::staged, ++staged_);
  plan_next();
}

// Only what neighbours read; and what this member sends to itself.
void CrossPlane::stage_chunk(const Flight& f, const Chunk& chunk) {
  const bool mine = chunk.sender == member_;
  const bool to_all = chunk.receiver == Chunk::kAll;
  const bool keeps = mine && (to_all || chunk.receiver == member_);
  const bool shows =
      chunk.reduces() ? chunk.reducer(hosts_, host_) != member_
      : to_all ? mine && locals_.size() > 1
               : mine && chunk.receiver != member_ && hosts_.host_of(chunk.receiver) == host_;
  if (!keeps && !shows) return;
  std::byte* const to = staged(staged_, member_, chunk);
  for (const Piece& piece : f.block.of(chunk)) {
    const Part& part = parts_[piece.part];
    if (!part.has(member_)) continue;
    const std::byte* const input = part.input + piece.input;
    if (shows) kernels::copy(to + piece.packed, input, piece.bytes);
    const bool elsewhere = part.output != nullptr && part.output + piece.output != input;
    if (keeps && elsewhere) kernels::copy(part.output + piece.output, input, piece.bytes);
  }
}

void CrossPlane::reduce() {
  Flight& f = flight(reduced_);
  for (const Flight::Job& job : f.jobs) {
    if (job.reduces) reduce_chunk(f, job);
  }
  f.partials_out.send_all(*wire_, Wire::Channel::kPartial, f.arena.data());
  ++reduced_;
}

void CrossPlane::reduce_chunk(Flight& f, const Flight::Job& job) {
  const Chunk& chunk = f.block.chunks[job.chunk];
  std::byte* const to = f.arena.data() + job.partial;
  for (const Piece& piece : f.block.of(chunk)) {
    const Part& part = parts_[piece.part];
    const auto input = [&](int member) {
      return member == member_ ? part.input + piece.input
                               : staged(reduced_, member, chunk) + piece.packed;
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

void CrossPlane::combine() {
  Flight& f = flight(combined_);
  for (const Flight::Job& job : f.jobs) {
    if (job.combines) combine_chunk(f, job);
  }
  f.results_out.send_all(*wire_, Wire::Channel::kResult, f.arena.data());
  ++combined_;
}

void CrossPlane::combine_chunk(Flight& f, const Flight::Job& job) {
  const Chunk& chunk = f.block.chunks[job.chunk];
  if (!chunk.reduces()) return;  // it is the result
  std::byte* const arena = f.arena.data();
  for (const Piece& piece : f.block.of(chunk)) {
    const Part& part = parts_[piece.part];
    int present = 0;
    size_t message = job.first_in;
    for (int host = 0; host < hosts_.hosts(); ++host) {  // the messages are in this order
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
    kernels::reduce_partials(s.dtype, s.reduce_op, arena + job.result + piece.packed,
                             inputs_.data(), present, piece.bytes / size_of(s.dtype),
                             factors_of(part));
  }
}

// Results that this member made or received, to where its neighbours reach them.
void CrossPlane::publish() {
  Flight& f = flight(published_);
  for (const Flight::Job& job : f.jobs) {
    if (!job.combines && !job.relays) continue;
    const Chunk& chunk = f.block.chunks[job.chunk];
    kernels::copy(published(published_, member_, chunk), f.arena.data() + job.result,
                  chunk.packed_bytes);
  }
  store(&HostProgress::reduced, ++published_);
}

void CrossPlane::consume() {
  const Flight& f = flight(consumed_);
  for (const Chunk& chunk : f.block.chunks) consume_chunk(f, chunk);
  store(&HostProgress::consumed, ++consumed_);
}

void CrossPlane::consume_chunk(const Flight& f, const Chunk& chunk) {
  const bool for_me = chunk.receiver == Chunk::kAll || chunk.receiver == member_;
  if (!for_me || chunk.sender == member_) return;
  const std::byte* const from = chunk.needed_on(hosts_, host_)
                                    ? published(consumed_, chunk.combiner(hosts_, host_), chunk)
                                    : staged(consumed_, chunk.sender, chunk);
  for (const Piece& piece : f.block.of(chunk)) {
    std::byte* const output = parts_[piece.part].output;
    if (output != nullptr) kernels::copy(output + piece.output, from + piece.packed, piece.bytes);
  }
}

}  // namespace farandole
