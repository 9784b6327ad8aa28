// SPDX-License-Identifier: Apache-2.0
// The calls that are under way, by name or by their order in a set. A call begins with its first report and ends
// when it is published, or fails.
#pragma once

#include <vector>

#include "control/calls/registry.h"
#include "control/coordinator/outbox.h"
#include "control/coordinator/set_table.h"

namespace farandole {

class OpenCalls {
 public:
  OpenCalls(int world_size, size_t capacity, Outbox& outbox)
      : outbox_(outbox), registry_(world_size, capacity) {}

  Registry& registry() { return registry_; }
  const Registry& registry() const { return registry_; }

  // Where a call of this request is, or will be.
  Call& slot(SetState& set, Definition& definition, const Request& request, uint64_t sequence) {
    check_place(request, sequence);
    return request.name.empty() ? unnamed_slot(set, sequence) : definition.call;
  }
  // The first report of it: with the joined members in it.
  void open(SetState& set, Definition& definition, Call& call, const Request& request,
            uint64_t sequence, int64_t now_ns);
  // It is over. The call itself stays where it is: drop_finished() clears unnamed ones away.
  void retire(Call& call);
  void fail(Call& call, const Failure& failure);
  // Of a call that not all have reported. A named one starts afresh when it comes again; an unnamed one keeps its
  // place in the order.
  void give_up(SetState& set, Call& call, const Failure& failure);
  // The same of one that nobody may bring any more: also an unnamed one is over.
  void end(SetState& set, Call& call, const Failure& failure);
  void drop_finished(SetState& set);

  // Both in no particular order.
  std::vector<Call*> all(SetState& set);
  std::vector<Call*> waiting(SetState& set);  // for some rank

 private:
  void write_unheard(const SetState& set, const Call& call, const Failure& failure);
  static void check_place(const Request& request, uint64_t sequence);
  static Call& unnamed_slot(SetState& set, uint64_t sequence);

  Outbox& outbox_;
  Registry registry_;
};

}  // namespace farandole
