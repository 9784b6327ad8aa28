// SPDX-License-Identifier: Apache-2.0
// The phases of a block, and when each may run. What they do to bytes is in cross_plane_work.cc.
#include "data/hierarchical/cross_plane.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "data/shm/host_plane.h"
#include "lib/os/memory.h"

namespace farandole {
namespace {

constexpr int64_t kShortestPoll = 10'000;  // ns
constexpr int64_t kLongestPoll = 200'000;

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
  return slots_begin(local_members) +
         static_cast<size_t>(local_members) * static_cast<size_t>(slots) * 2 * block_bytes;
}

CrossPlane::CrossPlane(Setup setup)
    : hosts_(checked(setup).hosts),
      member_(setup.member),
      host_(hosts_.host_of(member_)),
      locals_(hosts_.members_of(host_)),
      sizes_(setup.sizes),
      slots_(static_cast<uint64_t>(setup.slots)),
      silence_ns_(static_cast<int64_t>(std::min(setup.silence, 1e9) * 1e9)),
      watch_(std::move(setup.watch)),
      bells_(std::move(setup.bells)),
      progress_(setup.memory, static_cast<int>(locals_.size())),
      memory_(setup.memory + slots_begin(static_cast<int>(locals_.size()))),
      wire_(std::move(setup.wire)),
      plan_(hosts_, member_, sizes_),
      flights_(slots_ + 1),
      inputs_(static_cast<size_t>(hosts_.members())) {}

bool CrossPlane::supports(const Signature& signature) const {
  return HostPlane::can_carry_out(signature);
}

void CrossPlane::begin(std::span<const Part> parts) {
  if (aborted_ || has_next_ || !finished()) {
    throw Error(ErrorCode::kInternal, "cross plane: begin() while a bucket is in flight");
  }
  plan_.start(parts);
  parts_ = parts;
  last_message_ = now_ns();
  poll_ns_ = kShortestPoll;
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
  while (settled_ < published_ && flight(settled_).complete()) ++settled_;
  poll_ns_ = kShortestPoll;
  return finished() ? Progress::kFinished : Progress::kMoved;
}

bool CrossPlane::ready() const {
  return can_consume() || can_publish() || can_combine() || can_reduce() || can_stage() ||
         finished();
}

Deadline CrossPlane::look_again() const {
  for (uint64_t b = settled_; b < staged_; ++b) {
    if (flight(b).under_way()) return Deadline::at(next_poll_);
  }
  return Deadline::never();
}

void CrossPlane::abort() {
  aborted_ = true;
  parts_ = {};
  if (wire_->abandon()) return;
  // MPI may still read and write there: that memory is never used again.
  for (Flight& f : flights_) new std::vector<std::byte>(std::move(f.arena));
}

void CrossPlane::plan_next() {
  Flight& next = flight(staged_);
  has_next_ = plan_.next(next.block);
  if (has_next_) next.plan(hosts_, member_, parts_);
}

// The slot and the arena are free: consumed by this host, and no message under way.
bool CrossPlane::can_stage() const {
  if (!has_next_ || staged_ >= settled_ + slots_ || staged_ >= consumed_ + slots_) return false;
  return staged_ < slots_ || progress_.all_reached(&HostProgress::consumed, staged_ + 1 - slots_);
}

bool CrossPlane::can_reduce() const {
  return reduced_ < staged_ && progress_.all_reached(&HostProgress::staged, reduced_ + 1);
}

bool CrossPlane::can_combine() const {
  return combined_ < reduced_ && flight(combined_).partials_in.complete();
}

bool CrossPlane::can_publish() const {
  return published_ < combined_ && flight(published_).results_in.complete();
}

bool CrossPlane::can_consume() const {
  return consumed_ < published_ && progress_.all_reached(&HostProgress::reduced, consumed_ + 1);
}

// Also when messages are complete: nobody would drive them later.
bool CrossPlane::finished() const {
  return !has_next_ && consumed_ == staged_ && settled_ == staged_;
}

// True: a message is complete that was not before. Looks only at those that a phase waits for: MPI moves
// all others meanwhile.
bool CrossPlane::poll() {
  bool moved = false;
  const auto look = [&](uint64_t block, Mail Flight::* mail) {
    if (block < staged_) moved |= (flight(block).*mail).look(*wire_);
  };
  look(combined_, &Flight::partials_in);
  look(published_, &Flight::results_in);
  look(settled_, &Flight::partials_out);
  look(settled_, &Flight::results_out);
  if (moved) last_message_ = now_ns();
  return moved;
}

void CrossPlane::wait_for_wire() {
  if (look_again().is_never()) return;
  const int64_t now = now_ns();
  next_poll_ = now + poll_ns_;
  poll_ns_ = std::min(2 * poll_ns_, kLongestPoll);
  if (silence_ns_ == 0 || now - last_message_ < silence_ns_) return;
  throw Error(ErrorCode::kStall, "no message between the hosts for " +
                                     std::to_string(silence_ns_ / 1'000'000'000) +
                                     " s in the middle of a bucket: " + awaited() +
                                     "; the network is down, or that rank is stopped");
}

// Which member a message is due from, or has not taken one.
std::string CrossPlane::awaited() const {
  for (uint64_t b = settled_; b < staged_; ++b) {
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

// The last member of the host to get so far lets the others go on.
void CrossPlane::store(Column column, uint64_t blocks) {
  progress_.store(hosts_.local_of(member_), column, blocks);
  if (!progress_.all_reached(column, blocks)) return;
  for (size_t local = 0; local < bells_.size(); ++local) {
    if (locals_[local] != member_) bells_[local]->notify();
  }
}

}  // namespace farandole
