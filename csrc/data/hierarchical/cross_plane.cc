// SPDX-License-Identifier: Apache-2.0
#include "data/hierarchical/cross_plane.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "data/shm/host_plane.h"
#include "lib/os/memory.h"

namespace farandole {
namespace {

size_t slots_begin(int members) {  // the counters fill pages of their own
  return whole_pages(HostProgressTable::bytes_needed(members));
}

const CrossPlane::Setup& checked(const CrossPlane::Setup& setup) {
  const int members = setup.hosts.members();
  const bool placed = setup.member >= 0 && setup.member < members && setup.slots >= 1;
  const auto locals = placed ? setup.hosts.members_of(setup.hosts.host_of(setup.member)).size() : 0;
  const size_t needed =
      CrossPlane::bytes_needed(static_cast<int>(locals), setup.sizes.block_bytes, setup.slots);
  const bool complete = setup.memory != nullptr && setup.wire != nullptr &&
                        setup.bells.size() == locals && setup.bytes >= needed &&
                        reinterpret_cast<uintptr_t>(setup.memory) % CrossPlan::kAlignment == 0;
  if (placed && complete) return setup;
  throw Error(ErrorCode::kInvalidArgument,
              "plane of member " + std::to_string(setup.member) + " of " + std::to_string(members) +
                  ", with " + std::to_string(locals) +
                  " on its host: " + std::to_string(setup.bytes) + " bytes of memory for " +
                  std::to_string(setup.slots) + " slots of " +
                  std::to_string(setup.sizes.block_bytes) + " bytes and " +
                  std::to_string(setup.bells.size()) + " bells");
}

}  // namespace

size_t CrossPlane::bytes_needed(int local_members, size_t block_bytes, int slots) {
  return slots_begin(local_members) + CrossWorker::bytes_needed(local_members, block_bytes, slots);
}

CrossPlane::CrossPlane(Setup setup)
    : hosts_(checked(setup).hosts),
      member_(setup.member),
      locals_(hosts_.members_of(hosts_.host_of(member_))),
      slots_(static_cast<uint64_t>(setup.slots)),
      patience_(nanoseconds(setup.silence).count()),
      watch_(std::move(setup.watch)),
      bells_(std::move(setup.bells)),
      progress_(setup.memory, static_cast<int>(locals_.size())),
      wire_(std::move(setup.wire)),
      plan_(hosts_, member_, setup.sizes),
      worker_(hosts_, member_, setup.memory + slots_begin(static_cast<int>(locals_.size())), slots_,
              setup.sizes.block_bytes),
      flights_(slots_ + 1) {}

bool CrossPlane::supports(const Signature& signature) const {
  return HostPlane::can_carry_out(signature);
}

void CrossPlane::begin(std::span<const Part> parts) {
  if (aborted_ || has_next_ || !finished()) {
    throw Error(ErrorCode::kInternal, "cross plane: begin() while a bucket is in flight");
  }
  plan_.start(parts);
  parts_ = parts;
  worker_.start(parts);
  patience_.start();
  plan_next();
}

// One step inside the host at most; the wire is looked at each time, since that moves its messages.
Progress CrossPlane::step() {
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
  while (at_.settled < at_.published && flight(at_.settled).complete()) ++at_.settled;
  patience_.moved();
  return finished() ? Progress::kFinished : Progress::kMoved;
}

bool CrossPlane::ready() const {
  return can_consume() || can_publish() || can_combine() || can_reduce() || can_stage() ||
         finished();
}

Deadline CrossPlane::look_again() const {
  for (uint64_t b = at_.settled; b < at_.staged; ++b) {
    if (flight(b).under_way()) return patience_.next_look();
  }
  return Deadline::never();
}

void CrossPlane::abort() {
  aborted_ = true;
  parts_ = {};
  worker_.start({});
  if (wire_->abandon()) return;
  // The wire may still read and write there: that memory is never used again.
  for (Flight& f : flights_) new std::vector<std::byte>(std::move(f.arena));
}

void CrossPlane::plan_next() {
  Flight& next = flight(at_.staged);
  has_next_ = plan_.next(next.block);
  if (has_next_) next.plan(hosts_, member_, parts_);
}

// The slot and the arena are free: consumed by this host, and no message under way.
bool CrossPlane::can_stage() const {
  if (!has_next_ || at_.staged >= at_.settled + slots_ || at_.staged >= at_.consumed + slots_)
    return false;
  return at_.staged < slots_ ||
         progress_.all_reached(&HostProgress::consumed, at_.staged + 1 - slots_);
}

bool CrossPlane::can_reduce() const {
  return at_.reduced < at_.staged && progress_.all_reached(&HostProgress::staged, at_.reduced + 1);
}

bool CrossPlane::can_combine() const {
  return at_.combined < at_.reduced && flight(at_.combined).partials_in.complete();
}

bool CrossPlane::can_publish() const {
  return at_.published < at_.combined && flight(at_.published).results_in.complete();
}

bool CrossPlane::can_consume() const {
  return at_.consumed < at_.published &&
         progress_.all_reached(&HostProgress::reduced, at_.consumed + 1);
}

// Also when messages are complete: nobody would drive them later.
bool CrossPlane::finished() const {
  return !has_next_ && at_.consumed == at_.staged && at_.settled == at_.staged;
}

// True: a message is complete that was not before. Looks only at those that a phase waits for.
bool CrossPlane::poll() {
  wire_->move();
  bool moved = false;
  const auto look = [&](uint64_t block, Mail Flight::* mail) {
    if (block < at_.staged) moved |= (flight(block).*mail).look(*wire_);
  };
  look(at_.combined, &Flight::partials_in);
  look(at_.published, &Flight::results_in);
  look(at_.settled, &Flight::partials_out);
  look(at_.settled, &Flight::results_out);
  if (moved) patience_.message();
  return moved;
}

void CrossPlane::wait_for_wire() {
  if (look_again().is_never()) return;
  if (patience_.wait()) return;
  throw Error(ErrorCode::kStall, "no message between the hosts for " +
                                     std::to_string(patience_.silence_ns() / 1'000'000'000) +
                                     " s in the middle of a bucket: " + awaited() +
                                     "; the network is down, or that rank is stopped");
}

// Which member a message is due from, or has not taken one.
std::string CrossPlane::awaited() const {
  for (uint64_t b = at_.settled; b < at_.staged; ++b) {
    const Flight& f = flight(b);
    for (const Mail* mail : {&f.partials_in, &f.results_in}) {
      if (mail->under_way()) return "waiting for member " + std::to_string(mail->next().peer);
    }
    for (const Mail* mail : {&f.partials_out, &f.results_out}) {
      if (mail->under_way()) return "member " + std::to_string(mail->next().peer) + " takes none";
    }
  }
  return "none under way";
}

void CrossPlane::stage() {
  Flight& f = flight(at_.staged);
  if (f.arena.size() < f.arena_bytes) f.arena.resize(f.arena_bytes);
  f.partials_in.receive_all(*wire_, Wire::Channel::kPartial, f.arena.data());
  f.results_in.receive_all(*wire_, Wire::Channel::kResult, f.arena.data());
  worker_.stage(at_.staged, f);
  store(&HostProgress::staged, ++at_.staged);
  plan_next();
}

void CrossPlane::reduce() {
  Flight& f = flight(at_.reduced);
  worker_.reduce(at_.reduced, f);
  f.partials_out.send_all(*wire_, Wire::Channel::kPartial, f.arena.data());
  ++at_.reduced;
}

void CrossPlane::combine() {
  Flight& f = flight(at_.combined);
  worker_.combine(f);
  f.results_out.send_all(*wire_, Wire::Channel::kResult, f.arena.data());
  ++at_.combined;
}

void CrossPlane::publish() {
  worker_.publish(at_.published, flight(at_.published));
  store(&HostProgress::reduced, ++at_.published);
}

void CrossPlane::consume() {
  worker_.consume(at_.consumed, flight(at_.consumed));
  store(&HostProgress::consumed, ++at_.consumed);
}

// The last member of the host to get so far lets the others go on.
void CrossPlane::store(Column column, uint64_t blocks) {
  progress_.store(hosts_.local_of(member_), column, blocks);
  if (!progress_.all_reached(column, blocks)) return;
  for (size_t local = 0; local < bells_.size(); ++local) {
    if (locals_[local] != member_) bells_[local]->notify();
  }
}

}  // namespace farandole
