// SPDX-License-Identifier: Apache-2.0
#include "data/hierarchical/hierarchical_backend.h"

#include <string>
#include <utility>

#include "base/error.h"
#include "data/shm/shm_backend.h"
#include "lib/os/memory.h"

namespace farandole {
namespace {

size_t slots_begin(int members) {  // the slots start after the counters' pages
  return whole_pages(HostProgressTable::bytes_needed(members));
}

const HierarchicalBackend::Setup& checked(const HierarchicalBackend::Setup& setup) {
  const size_t needed = HierarchicalBackend::bytes_needed(static_cast<int>(setup.wakeups.size()),
                                                          setup.sizes.block_bytes, setup.slots);
  if (setup.bytes >= needed) return setup;
  throw Error(ErrorCode::kInternal, "the staging memory has " + std::to_string(setup.bytes) +
                                        " bytes instead of " + std::to_string(needed));
}

}  // namespace

size_t HierarchicalBackend::bytes_needed(int local_members, size_t block_bytes, int slots) {
  return slots_begin(local_members) +
         HierarchicalWorker::bytes_needed(local_members, block_bytes, slots);
}

HierarchicalBackend::HierarchicalBackend(Setup setup)
    : hosts_(checked(setup).hosts),
      member_(setup.member),
      locals_(hosts_.members_of(hosts_.host_of(member_))),
      slots_(static_cast<uint64_t>(setup.slots)),
      patience_(nanoseconds(setup.silence).count(), std::move(setup.names)),
      watch_(std::move(setup.watch)),
      wakeups_(std::move(setup.wakeups)),
      progress_(setup.memory, static_cast<int>(locals_.size())),
      wire_(std::move(setup.wire)),
      plan_(hosts_, member_, setup.sizes),
      worker_(hosts_, member_, setup.memory + slots_begin(static_cast<int>(locals_.size())), slots_,
              setup.sizes.block_bytes),
      transfers_(slots_ + 1) {}

void HierarchicalBackend::begin(std::span<const Part> parts) {
  if (aborted_ || has_next_ || !finished()) {
    throw Error(ErrorCode::kInternal,
                "hierarchical backend: begin() was called during a bucket or after abort()");
  }
  plan_.start(parts);
  parts_ = parts;
  worker_.start(parts);
  patience_.start();
  plan_next();
}

// Does at most one phase of a block. Polls the wire first, because polling moves messages.
Progress HierarchicalBackend::step() {
  const bool moved = poll();
  if (can_consume()) {
    watch_.time(Phase::kConsume, [this] { consume(); });
  } else if (can_publish()) {
    watch_.time(Phase::kConsume, [this] { publish(); });
  } else if (can_combine()) {
    watch_.time(Phase::kReduce, [this] { combine(); });
  } else if (can_reduce()) {
    watch_.time(Phase::kReduce, [this] { reduce(); });
  } else if (can_stage()) {
    watch_.time(Phase::kStage, [this] { stage(); });
  } else if (!moved) {
    if (finished()) return Progress::kFinished;
    wait_for_wire();
    return Progress::kWaiting;
  }
  while (at_.settled < at_.published && transfer(at_.settled).complete()) ++at_.settled;
  patience_.moved();
  return finished() ? Progress::kFinished : Progress::kMoved;
}

bool HierarchicalBackend::ready() const {
  return can_consume() || can_publish() || can_combine() || can_reduce() || can_stage() ||
         finished();
}

Deadline HierarchicalBackend::look_again() const {
  for (uint64_t b = at_.settled; b < at_.staged; ++b) {
    if (transfer(b).under_way()) return patience_.next_look();
  }
  return Deadline::never();
}

void HierarchicalBackend::abort() {
  aborted_ = true;
  parts_ = {};
  worker_.forget();
  if (wire_->abandon()) return;
  // Leaks the arenas, because the wire may still access them.
  for (BlockTransfer& f : transfers_) new std::vector<std::byte>(std::move(f.arena));
}

size_t HierarchicalBackend::held() const {
  size_t bytes = 0;
  for (const BlockTransfer& f : transfers_) bytes += f.arena.capacity();
  return bytes;
}

// Frees the arenas. Only the wire and this member access them, and neither does so after finished().
void HierarchicalBackend::rest() {
  for (BlockTransfer& f : transfers_) f.arena = {};
}

void HierarchicalBackend::plan_next() {
  BlockTransfer& next = transfer(at_.staged);
  has_next_ = plan_.next(next.block);
  if (has_next_) next.plan(hosts_, member_, parts_);
}

// True if there is a block to stage and a slot for it. A slot and its arena are free once this host's members have
// consumed the slot's last block and that block's messages are complete.
bool HierarchicalBackend::can_stage() const {
  if (!has_next_ || at_.staged >= at_.settled + slots_ || at_.staged >= at_.consumed + slots_)
    return false;
  return at_.staged < slots_ ||
         progress_.all_reached(&HostProgress::consumed, at_.staged + 1 - slots_);
}

bool HierarchicalBackend::can_reduce() const {
  return at_.reduced < at_.staged && progress_.all_reached(&HostProgress::staged, at_.reduced + 1);
}

bool HierarchicalBackend::can_combine() const {
  return at_.combined < at_.reduced && transfer(at_.combined).partials_in.complete();
}

bool HierarchicalBackend::can_publish() const {
  return at_.published < at_.combined && transfer(at_.published).results_in.complete();
}

bool HierarchicalBackend::can_consume() const {
  return at_.consumed < at_.published &&
         progress_.all_reached(&HostProgress::reduced, at_.consumed + 1);
}

// False while messages are in flight, because no thread polls the wire once a bucket is finished.
bool HierarchicalBackend::finished() const {
  return !has_next_ && at_.consumed == at_.staged && at_.settled == at_.staged;
}

// Tests the messages for which phases wait. Returns true if a message has completed.
bool HierarchicalBackend::poll() {
  wire_->move();
  bool moved = false;
  const auto look = [&](uint64_t block, MessageQueue BlockTransfer::* queue) {
    if (block < at_.staged) moved |= (transfer(block).*queue).look(*wire_);
  };
  look(at_.combined, &BlockTransfer::partials_in);
  look(at_.published, &BlockTransfer::results_in);
  look(at_.settled, &BlockTransfer::partials_out);
  look(at_.settled, &BlockTransfer::results_out);
  if (moved) patience_.message();
  return moved;
}

void HierarchicalBackend::wait_for_wire() {
  if (look_again().is_never()) return;
  if (patience_.wait(wire_->wakes())) return;
  throw Error(ErrorCode::kStall, "no message arrived from other hosts for " +
                                     std::to_string(patience_.silence_ns() / 1'000'000'000) +
                                     " s while a bucket was in flight: " + awaited() +
                                     "; the network is down, or a rank of that host is stopped");
}

// Returns the part of the error text that names the first member that has not sent a message or does not receive one.
std::string HierarchicalBackend::awaited() const {
  for (uint64_t b = at_.settled; b < at_.staged; ++b) {
    const BlockTransfer& f = transfer(b);
    for (const MessageQueue* queue : {&f.partials_in, &f.results_in}) {
      if (queue->under_way()) return "waiting for " + patience_.name(queue->next().peer);
    }
    for (const MessageQueue* queue : {&f.partials_out, &f.results_out}) {
      if (queue->under_way()) return patience_.name(queue->next().peer) + " receives no message";
    }
  }
  return "no message is in flight";
}

void HierarchicalBackend::stage() {
  BlockTransfer& f = transfer(at_.staged);
  if (f.arena.size() < f.arena_bytes) f.arena.resize(f.arena_bytes);
  f.partials_in.receive_all(*wire_, Wire::Channel::kPartial, f.arena.data());
  f.results_in.receive_all(*wire_, Wire::Channel::kResult, f.arena.data());
  worker_.stage(at_.staged, f);
  store(&HostProgress::staged, ++at_.staged);
  plan_next();
}

void HierarchicalBackend::reduce() {
  BlockTransfer& f = transfer(at_.reduced);
  worker_.reduce(at_.reduced, f);
  f.partials_out.send_all(*wire_, Wire::Channel::kPartial, f.arena.data());
  ++at_.reduced;
}

void HierarchicalBackend::combine() {
  BlockTransfer& f = transfer(at_.combined);
  worker_.combine(f);
  f.results_out.send_all(*wire_, Wire::Channel::kResult, f.arena.data());
  ++at_.combined;
}

void HierarchicalBackend::publish() {
  worker_.publish(at_.published, transfer(at_.published));
  store(&HostProgress::reduced, ++at_.published);
}

void HierarchicalBackend::consume() {
  worker_.consume(at_.consumed, transfer(at_.consumed));
  store(&HostProgress::consumed, ++at_.consumed);
}

// Stores this member's count. The last of the host's members to reach this count wakes the others.
void HierarchicalBackend::store(Column column, uint64_t blocks) {
  progress_.store(hosts_.local_of(member_), column, blocks);
  if (!progress_.all_reached(column, blocks)) return;
  for (size_t local = 0; local < wakeups_.size(); ++local) {
    if (locals_[local] != member_) wakeups_[local].notify();
  }
}

}  // namespace farandole
