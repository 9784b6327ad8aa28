// SPDX-License-Identifier: Apache-2.0
#include "runtime/calls/direct.h"

#include <exception>
#include <string>
#include <utility>

#include "base/clock.h"
#include "runtime/calls/parts.h"

namespace farandole {

void DirectCalls::tell(const ProcessSet* set) {
  if (set && set->cell) set->cell->tell(set->ended, set->under_way);
}

std::optional<DirectCalls::Visit> DirectCalls::enter(const CheckedCall& call,
                                                     const Submission& mine) {
  const Request& request = call.request;
  ProcessSet& set = setup_.sets.own(request.set);
  const bool free = set.cell && !set.meeting && set.under_way == 0;
  if (!free || request.parts() > 1 || !fits_cell(request.signature, mine, set)) return std::nullopt;
  const uint64_t definition = setup_.pending.definition_of(request, mine, call.found);
  if (definition == 0) return std::nullopt;
  const uint64_t sequence = mine.named ? 0 : setup_.pending.next_unnamed(request.set);
  const int64_t rows = request.signature.traits().ragged() ? mine.shape[0] : 0;
  Visit visit{set.cell, {definition, sequence, rows}, set};
  setup_.memory.add(request.signature, mine, set);
  // Nothing after this line throws. A cell that nobody leaves would block all later calls of the set.
  set.meeting = true;
  if (mine.named) mine.named->in_flight = true;
  return visit;
}

// If this rank fails after all members have met, the whole job ends, because only this rank would lack the result.
bool DirectCalls::meet(const Visit& visit, const Request& request, Submission& mine) {
  bool met = false;
  try {
    const Part part = part_of({}, request.signature, visit.set, &mine);
    met = visit.cell->meet(visit.call, input_in_cell(part, visit.set.member));
    if (!met) return false;
    // Readers of flight recorders match ranks' calls by this number. The bit distinguishes it from log positions.
    constexpr uint64_t kInCell = uint64_t{1} << 62;
    setup_.recorder.negotiated(mine.recorded, 0, kInCell | visit.cell->completed(), now_ns());
    complete(part, visit.set, *visit.cell);
  } catch (const std::exception& error) {
    if (met) {
      setup_.job.fail({ErrorCode::kInternal, std::string("a result in a cell: ") + error.what()});
    }
    return false;
  }
  return true;
}

DirectCalls::Next DirectCalls::leave(const Request& request, const Submission& mine, bool met) {
  setup_.memory.remove(mine);
  ProcessSet* set = setup_.sets.find(request.set);
  if (set) set->meeting = false;
  left_.notify_all();  // threads in clear() continue once this thread releases the mutex
  if (!met && setup_.job.broken()) return Next::kEnded;  // RankCalls::clear() fails all handles
  if (!met) return set ? Next::kReport : Next::kFails;
  setup_.pending.finish(mine);
  if (set && !mine.named) ++set->unnamed_in_cell;
  last_ns_ = mine.recorded.submitted_ns;
  setup_.recorder.done(mine.recorded, now_ns());
  setup_.handles.cancel(mine.handle);
  return Next::kEnded;
}

void DirectCalls::clear(std::unique_lock<std::mutex>& lock, SetId id) {
  for (;;) {
    const ProcessSet* set = setup_.sets.find(id);
    if (!set || !set->meeting) return;
    set->cell->disturb();
    left_.wait(lock);
  }
}

void DirectCalls::clear(std::unique_lock<std::mutex>& lock) {
  while (const std::optional<SetId> id = setup_.sets.meeting()) clear(lock, *id);
}

}  // namespace farandole
