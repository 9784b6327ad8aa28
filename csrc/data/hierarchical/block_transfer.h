// SPDX-License-Identifier: Apache-2.0
// One block in flight between hosts, as one member sees it: its jobs for each chunk, its messages, and the
// memory that the messages use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "data/hierarchical/hierarchical_schedule.h"
#include "data/hierarchical/message_queue.h"

namespace farandole {

// Whether any member on the host has an input.
bool host_has(const Part& part, const HostMap& hosts, int host);

struct BlockTransfer {
  // This member's tasks for one chunk. Offsets are in `arena`.
  struct Job {
    uint32_t chunk;
    bool reduces = false;   // makes this host's partial result
    bool combines = false;  // makes the result from partials, or passes on the one received
    bool relays = false;    // receives the result
    size_t partial = 0;
    size_t result = 0;
    size_t first_in = 0, last_in = 0;  // range of partials_in
  };

  HierarchicalBlock block;
  std::vector<Job> jobs;
  MessageQueue partials_in, partials_out, results_in, results_out;
  std::vector<std::byte> arena;  // all memory that the wire accesses
  size_t arena_bytes = 0;
  size_t sum_bytes = 0;  // behind each message, see MessageQueue; equal on all members

  // Fills `jobs` and the messages from `block`. Does not touch the arena, which may still be in use.
  void plan(const HostMap& hosts, int member, std::span<const Part> parts);
  bool complete() const {
    return partials_in.complete() && partials_out.complete() && results_in.complete() &&
           results_out.complete();
  }
  bool under_way() const {
    return partials_in.under_way() || partials_out.under_way() || results_in.under_way() ||
           results_out.under_way();
  }

 private:
  struct Planner;
};

}  // namespace farandole
