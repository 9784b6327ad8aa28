// SPDX-License-Identifier: Apache-2.0
// The calls in flight, by name or by their order in a set. A call begins with its first report and ends when
// it is published or fails.
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

  // The call slot of a request; it may not be open yet.
  Call& slot(SetState& set, Definition& definition, const Request& request, uint64_t sequence) {
    check_place(request, sequence);
    return request.name.empty() ? unnamed_slot(set, sequence) : definition.call;
  }
  // Opens a call at its first report, with the joined members already counted.
  void open(SetState& set, Definition& definition, Call& call, const Request& request,
            uint64_t sequence, int64_t now_ns);
  // Ends a call. Unnamed ones stay in their slot until drop_finished().
  void retire(Call& call);
  void fail(Call& call, const Failure& failure);
  // Fails a call that not all have reported. A named call can begin anew; an unnamed one keeps its place in
  // the order until the others have reported it.
  void give_up(SetState& set, Call& call, const Failure& failure);
  // Likewise for a call that nobody will report any more: an unnamed one ends, too.
  void end(SetState& set, Call& call, const Failure& failure);
  void drop_finished(SetState& set);

  // Both lists are in no particular order.
  std::vector<Call*> all(SetState& set);
  std::vector<Call*> waiting(SetState& set);  // for the report of some rank

 private:
  void write_unheard(const SetState& set, const Call& call, const Failure& failure);
  static void check_place(const Request& request, uint64_t sequence);
  static Call& unnamed_slot(SetState& set, uint64_t sequence);

  Outbox& outbox_;
  Registry registry_;
};

}  // namespace farandole
