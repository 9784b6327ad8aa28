// SPDX-License-Identifier: Apache-2.0
// The backend across hosts that are groups of threads: their layouts, blocks, buckets and memory. The test
// brings the wires.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/backend/backend_conformance.h"
#include "data/hierarchical/hierarchical_backend.h"

namespace farandole::check {

struct Shape {
  HierarchicalSchedule::Sizes sizes;
  int slots;
};

// Tiny blocks make many of them; one hop and two, one chunk and many, all occur.
inline constexpr Shape kShapes[] = {{{512, 64, 0}, 2},       {{1024, 64, 100}, 4},
                                    {{4096, 64, 0}, 3},      {{4096, 1024, 3000}, 2},
                                    {{4096, 64, 0, 320}, 4}, {{64 * 1024, 4096, 16384}, 4}};

// The host of each member: equal, unequal, interleaved, and alone.
inline const std::vector<std::vector<int>> kHosts = {
    {0, 1},          {0, 0, 1, 1},       {0, 0, 1},          {0, 1, 1, 1},       {0, 1, 2},
    {0, 0, 1, 2},    {0, 1, 0, 1},       {0, 0, 1, 1, 2, 2}, {0, 1, 1, 2, 0, 1}, {0, 1, 2, 3, 4},
    {0, 0, 0, 1, 1}, {0, 0, 0, 0, 1, 2}, {0, 0, 0}};

inline BackendWorld hierarchical_world(
    const std::vector<int>& host, const Shape& shape,
    const std::function<std::unique_ptr<Wire>(int member)>& wire_of) {
  const size_t bytes = HierarchicalBackend::bytes_needed(static_cast<int>(host.size()),
                                                         shape.sizes.block_bytes, shape.slots);
  const auto backend = [=](const BackendWorld::Place& place) -> std::unique_ptr<Backend> {
    HierarchicalBackend::Setup setup{HostMap(host)};
    const int own = setup.hosts.host_of(place.member);
    setup.member = place.member;
    setup.bytes = bytes;
    setup.memory = place.memory + static_cast<size_t>(own) * bytes;
    for (int member : setup.hosts.members_of(own)) {
      setup.wakeups.push_back(place.wakeups[static_cast<size_t>(member)]);
    }
    setup.wire = wire_of(place.member);
    for (size_t member = 0; member < host.size(); ++member) {
      setup.names.push_back("member " + std::to_string(member) + " on host " +
                            std::to_string(host[member]));
    }
    setup.sizes = shape.sizes;
    setup.slots = shape.slots;
    return std::make_unique<HierarchicalBackend>(std::move(setup));
  };
  return BackendWorld(static_cast<int>(host.size()), bytes * host.size(), backend);
}

inline std::vector<BucketSpec> on_hosts(std::vector<BucketSpec> buckets,
                                        const std::vector<int>& host) {
  for (BucketSpec& bucket : buckets) {
    for (PartSpec& spec : bucket) spec.host = host;
  }
  return buckets;
}

inline std::vector<BucketSpec> random_buckets(Random& random, const std::vector<int>& host,
                                              size_t count, size_t most_parts,
                                              size_t most_elements) {
  return on_hosts(
      random_buckets(random, static_cast<int>(host.size()), count, most_parts, most_elements),
      host);
}

}  // namespace farandole::check
