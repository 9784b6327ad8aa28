// SPDX-License-Identifier: Apache-2.0
// One block on its way across hosts, as one member sees it: what it has to do about each chunk, the
// messages, and the memory that they travel from and to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "data/hierarchical/cross_plan.h"
#include "data/hierarchical/mail.h"

namespace farandole {

// Whether a member of the host has an input.
bool host_has(const Part& part, const HostMap& hosts, int host);

struct Flight {
  // What this member does about one chunk. Offsets are in the arena.
  struct Job {
    uint32_t chunk;
    bool reduces = false;   // makes this host's partial
    bool combines = false;  // makes the result of partials, or hands on what it received
    bool relays = false;    // receives the result
    size_t partial = 0;
    size_t result = 0;
    size_t first_in = 0, last_in = 0;  // of partials_in
  };

  CrossBlock block;
  std::vector<Job> jobs;
  Mail partials_in, partials_out, results_in, results_out;
  std::vector<std::byte> arena;  // all that the wire touches
  size_t arena_bytes = 0;

  // Fills jobs and messages for the block. The arena may still be in use, and is left alone.
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
