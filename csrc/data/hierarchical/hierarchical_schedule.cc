// SPDX-License-Identifier: Apache-2.0
#include "data/hierarchical/hierarchical_schedule.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "base/error.h"

namespace farandole {
namespace {

// Returns the number of bytes of a partial result per byte of input.
size_t widening(const Part& part) {
  const Signature& s = part.signature;
  return size_of(kernels::partial_dtype(s.dtype, s.reduce_op, factors_of(part))) / size_of(s.dtype);
}

}  // namespace

int Chunk::reducer(const HostMap& hosts, int host) const {
  if (stripe != kAll) return hosts.worker(host, stripe);
  if (sender != kAll) return sender;
  return host == hosts.host_of(receiver) ? receiver : hosts.worker(host, hosts.local_of(receiver));
}

int Chunk::combiner(const HostMap& hosts, int host) const {
  return stripe != kAll ? hosts.worker(host, stripe) : receiver;
}

bool Chunk::needed_on(const HostMap& hosts, int host) const {
  if (sender != kAll && host == hosts.host_of(sender)) return false;
  return receiver == kAll || host == hosts.host_of(receiver);
}

HierarchicalSchedule::HierarchicalSchedule(const HostMap& hosts, int member, const Sizes& sizes)
    : hosts_(hosts), member_(member), sizes_(sizes), run_(hosts.members()) {}

void HierarchicalSchedule::start(std::span<const Part> parts) {
  for (const Part& part : parts) PartLayout(part, hosts_.members()).check(member_);
  run_.start(parts);
  lanes_.clear();
}

bool HierarchicalSchedule::next(HierarchicalBlock& block) {
  for (;;) {
    block.clear();
    if (!lanes_.empty() && fill(block)) return true;
    const auto alike = [](const Part& part) {
      return std::pair(kind_of(part.signature), part.signature.target());
    };
    if (!run_.open(alike)) return false;
    kind_ = kind_of(run_.front().signature);
    lanes_.assign(static_cast<size_t>(hosts_.members()), run_.lane());
  }
}

HierarchicalSchedule::Kind HierarchicalSchedule::kind_of(const Signature& signature) {
  switch (signature.traits().pattern) {
    case Pattern::kReduceToAll: return Kind::kAllreduce;
    case Pattern::kReduceToOwners: return Kind::kReducescatter;
    case Pattern::kOneToAll:
    case Pattern::kEachToAll: return Kind::kShare;
    case Pattern::kEachToEach: return Kind::kAlltoall;
    case Pattern::kMeet:
    case Pattern::kNone: break;
  }
  throw Error(ErrorCode::kInternal, std::string(name_of(signature.op)) + " moves no bytes");
}

bool HierarchicalSchedule::fill(HierarchicalBlock& block) {
  sections_.clear();
  switch (kind_) {
    case Kind::kAllreduce: return fill_allreduce(block);
    case Kind::kReducescatter: return fill_reducescatter(block);
    case Kind::kShare: return fill_share(block);
    case Kind::kAlltoall: return fill_alltoall(block);
  }
  return false;
}

bool HierarchicalSchedule::fill_allreduce(HierarchicalBlock& block) {
  bool widens = false;
  const size_t bytes = run_.fill_window(
      lanes_[0], sizes_.block_bytes, widening,
      [&](const PartLayout&, const PartLane& lane) { return run_[lane.part].signature.bytes(); },
      [&](const PartLane& lane, size_t slot, size_t length) {
        const size_t scale = widening(run_[lane.part]);
        sections_.push_back({static_cast<uint32_t>(lane.part), slot, lane.offset, lane.offset,
                             length, scale, Chunk::kAll});
        widens |= scale > 1;
      });
  if (bytes == 0) return false;
  const auto hosts = static_cast<size_t>(hosts_.hosts());
  const size_t stripe = bytes / static_cast<size_t>(hosts_.stripes());
  // With two hosts, one hop does not send more bytes than two hops do, unless partial results are wider than results.
  const bool direct = stripe * (hosts - 1) <= sizes_.direct_bytes || (hosts <= 2 && !widens);
  Chunk chunk;
  chunk.receiver = run_.front().signature.target();
  homes_.assign(1, Chunk::kAll);
  if (chunk.receiver == Chunk::kAll && !direct) {
    homes_.resize(hosts);
    std::iota(homes_.begin(), homes_.end(), 0);
  }
  cut_stripes(block, chunk, 0, bytes, homes_);
  return true;
}

// Cuts all shares of a part at the same offsets, as if each share were as long as the first one, which is the longest.
// Therefore the output may start at the input's address: it overwrites only bytes that have already been reduced.
bool HierarchicalSchedule::fill_reducescatter(HierarchicalBlock& block) {
  const size_t window = sizes_.block_bytes / lanes_.size() / kAlignment * kAlignment;
  const size_t bytes = run_.fill_window(
      lanes_[0], window, widening,
      [&](const PartLayout& layout, const PartLane&) { return layout.share_bytes(0); },
      [&](const PartLane& lane, size_t slot, size_t length) {
        sections_.push_back({static_cast<uint32_t>(lane.part), slot, 0, lane.offset, length,
                             widening(run_[lane.part]), Chunk::kAll});
      });
  if (bytes == 0) return false;
  const std::vector<Section> window_sections = std::move(sections_);
  for (int owner = 0; owner < hosts_.members(); ++owner) {
    const size_t begin = static_cast<size_t>(owner) * window;
    sections_.clear();
    for (Section section : window_sections) {
      const PartLayout layout(run_[section.part], hosts_.members());
      const size_t share = layout.share_bytes(owner);
      if (section.output >= share) continue;
      section.slot += begin;
      section.input = layout.share_start(owner) + section.output;
      section.bytes = std::min(section.bytes, share - section.output);
      sections_.push_back(section);
    }
    if (sections_.empty()) continue;
    Chunk chunk;
    chunk.receiver = owner;
    cut_range(block, chunk, begin, begin + bytes);
  }
  return true;
}

// Finds the senders that have bytes left in this run. Returns the size of each sender's window.
size_t HierarchicalSchedule::next_window(std::vector<int>& senders) {
  senders.clear();
  for (int sender = 0; sender < hosts_.members(); ++sender) {
    PartLane& lane = lanes_[static_cast<size_t>(sender)];
    const auto empty = [&] {
      const PartLayout layout(run_[lane.part], hosts_.members());
      if (layout.piece_bytes(sender, lane.piece) > 0) return false;
      if (++lane.piece == layout.pieces()) ++lane.part, lane.piece = 0;
      return true;
    };
    while (!run_.ended(lane) && empty()) {
    }
    if (!run_.ended(lane)) senders.push_back(sender);
  }
  const size_t count = std::max<size_t>(senders.size(), 1);
  return sizes_.block_bytes / count / kAlignment * kAlignment;
}

// Fills sections_ with the sender's next bytes, starting at slot offset 0. Output offsets are those of this member.
size_t HierarchicalSchedule::take_sent(int sender, size_t window) {
  sections_.clear();
  return run_.fill_window(
      lanes_[static_cast<size_t>(sender)], window, as_it_is,
      [&](const PartLayout& layout, const PartLane& lane) {
        return layout.piece_bytes(sender, lane.piece);
      },
      [&](const PartLane& lane, size_t slot, size_t bytes) {
        const PartLayout layout(run_[lane.part], hosts_.members());
        const int receiver = layout.receiver(sender, lane.piece);
        const int where = receiver == PartLayout::kEverybody ? member_ : receiver;
        sections_.push_back({static_cast<uint32_t>(lane.part), slot,
                             layout.piece_start(sender, where) + lane.offset,
                             layout.landing_start(sender, where) + lane.offset, bytes, 1,
                             receiver});
      });
}

// A single sender sends each chunk to one host, which passes the chunk on, so that every link carries each byte once.
// If there are several senders, each sends its bytes to all hosts.
bool HierarchicalSchedule::fill_share(HierarchicalBlock& block) {
  const size_t window = next_window(senders_);
  for (size_t i = 0; i < senders_.size(); ++i) {
    const int sender = senders_[i];
    const size_t bytes = take_sent(sender, window);
    for (Section& section : sections_) section.slot += i * window;
    Chunk chunk;
    chunk.sender = sender;
    homes_.assign(1, Chunk::kAll);
    if (senders_.size() > 1) {
      chunk.stripe = hosts_.local_of(sender);
      cut_range(block, chunk, i * window, i * window + bytes);
      continue;
    }
    const auto others = static_cast<size_t>(hosts_.hosts() - 1);
    if (others > 1 &&
        bytes / static_cast<size_t>(hosts_.stripes()) * others > sizes_.direct_bytes) {
      homes_.clear();
      for (int host = 0; host < hosts_.hosts(); ++host) {
        if (host != hosts_.host_of(sender)) homes_.push_back(host);
      }
    }
    cut_stripes(block, chunk, 0, bytes, homes_);
  }
  return !senders_.empty();
}

bool HierarchicalSchedule::fill_alltoall(HierarchicalBlock& block) {
  const size_t window = next_window(senders_);
  for (size_t i = 0; i < senders_.size(); ++i) {
    take_sent(senders_[i], window);
    for (Section& section : sections_) section.slot += i * window;
    const std::vector<Section> sent = std::move(sections_);
    for (const Section& section : sent) {
      sections_.assign(1, section);
      Chunk chunk;
      chunk.sender = senders_[i];
      chunk.receiver = section.receiver;
      cut_range(block, chunk, section.slot, section.slot + section.bytes);
    }
  }
  return !senders_.empty();
}

// Cuts every stripe into chunks, which are assigned to the homes in turn. The next block continues with the next home.
void HierarchicalSchedule::cut_stripes(HierarchicalBlock& block, Chunk chunk, size_t begin,
                                       size_t bytes, std::span<const int> homes) {
  const auto stripes = static_cast<size_t>(hosts_.stripes());
  const size_t count = stripes * homes.size();
  const size_t even = round_up((bytes + count - 1) / count, kAlignment);
  const size_t unit = std::clamp(even, sizes_.least_chunk, sizes_.most_chunk);
  const size_t chunks = (bytes + unit - 1) / unit;
  for (size_t i = 0; i < chunks; ++i) {
    chunk.stripe = static_cast<int>(i % stripes);
    chunk.home = homes[(turn_ + i / stripes) % homes.size()];
    cut(block, chunk, begin + i * unit, begin + std::min(bytes, (i + 1) * unit));
  }
  turn_ += (chunks + stripes - 1) / stripes;
}

void HierarchicalSchedule::cut_range(HierarchicalBlock& block, const Chunk& chunk, size_t begin,
                                     size_t end) const {
  for (size_t at = begin; at < end; at += sizes_.most_chunk) {
    cut(block, chunk, at, std::min(end, at + sizes_.most_chunk));
    const Chunk& added = block.chunks.back();
    if (added.first == added.last) block.chunks.pop_back();  // the owner has no bytes there
  }
}

// Adds one chunk with the sections in [begin, end) of the slot.
void HierarchicalSchedule::cut(HierarchicalBlock& block, Chunk chunk, size_t begin,
                               size_t end) const {
  chunk.begin = begin;
  chunk.wide_bytes = chunk.packed_bytes = 0;
  chunk.first = static_cast<uint32_t>(block.pieces.size());
  for (const Section& section : sections_) {
    const size_t section_end = section.slot + section.bytes * section.scale;
    if (section.slot >= end) break;
    if (section_end <= begin) continue;
    const size_t from = std::max(begin, section.slot);
    const size_t skipped = (from - section.slot) / section.scale;
    const size_t element = size_of(run_[section.part].signature.dtype);
    const Piece piece = {section.part,
                         from - begin,
                         round_up(chunk.packed_bytes, element),
                         section.input + skipped,
                         section.output + skipped,
                         (std::min(end, section_end) - from) / section.scale};
    chunk.wide_bytes = piece.wide + piece.bytes * section.scale;
    chunk.packed_bytes = piece.packed + piece.bytes;
    block.pieces.push_back(piece);
  }
  chunk.last = static_cast<uint32_t>(block.pieces.size());
  block.chunks.push_back(chunk);
}

}  // namespace farandole
