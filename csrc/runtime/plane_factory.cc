// SPDX-License-Identifier: Apache-2.0
#include "runtime/plane_factory.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "data/hierarchical/cross_plane.h"
#include "data/shm/host_plane.h"

namespace farandole {
namespace {

HostMap host_map(const Topology& topology, const std::vector<Rank>& ranks) {
  std::vector<int> host;
  for (Rank rank : ranks) host.push_back(topology.node[static_cast<size_t>(rank)]);
  return HostMap(host);
}

struct CrossBlocks {
  CrossPlan::Sizes sizes;
  int slots;
};

// Smaller blocks than inside a host, and more of them under way: links carry bytes while others are
// reduced. With many hosts larger ones again, so that each host's chunk of a stripe is no tiny message.
CrossBlocks cross_blocks(const Config& config, const HostMap& hosts) {
  constexpr size_t kSmaller = 2, kMore = 4;
  constexpr size_t kChunk = 4096, kManyHosts = 2 << 20;
  const auto members = static_cast<size_t>(hosts.members());
  const auto chunks = static_cast<size_t>(hosts.hosts()) * static_cast<size_t>(hosts.stripes());
  const size_t usual = static_cast<size_t>(config.block_bytes) / kSmaller;
  const size_t wanted =
      std::max({usual, std::min(chunks * kChunk, kManyHosts), CrossPlan::kAlignment * members});
  CrossBlocks blocks;
  blocks.sizes.block_bytes =
      std::min(round_up(wanted, CrossPlan::kAlignment), CrossPlan::kMostBlockBytes);
  const auto slots = static_cast<size_t>(config.staging_slots);
  const size_t staged = kMore * slots * usual;  // bytes, whatever the block
  blocks.slots = static_cast<int>(std::max(slots, staged / blocks.sizes.block_bytes));
  return blocks;
}

}  // namespace

size_t PlaneFactory::staging_bytes(const std::vector<Rank>& ranks) const {
  const HostMap hosts = host_map(topology_, ranks);
  if (hosts.hosts() == 1) {
    return HostPlane::bytes_needed(hosts.members(), static_cast<size_t>(config_.block_bytes),
                                   static_cast<int>(config_.staging_slots));
  }
  const CrossBlocks blocks = cross_blocks(config_, hosts);
  return CrossPlane::bytes_needed(static_cast<int>(topology_.locals_among(ranks).size()),
                                  blocks.sizes.block_bytes, blocks.slots);
}

std::unique_ptr<Lane> PlaneFactory::open_lane(SetId id, const ProcessSet& set, Segment& staging,
                                              Feeds feeds) const {
  std::vector<int> locals = topology_.locals_among(set.ranks);
  std::vector<EventCount*> bells;
  for (int local : locals) bells.push_back(fabric_.bells()[static_cast<size_t>(local)]);
  if (bells.size() < set.ranks.size()) {
    return lane_across_hosts(id, set, staging, feeds, std::move(bells));
  }
  HostPlane::Setup setup;
  setup.member = set.member;
  setup.members = set.members();
  setup.memory = staging.data();
  setup.bytes = staging.size();
  setup.block_bytes = static_cast<size_t>(config_.block_bytes);
  setup.slots = static_cast<int>(config_.staging_slots);
  setup.bells = std::move(bells);
  setup.arenas = fabric_.arenas();
  setup.locals = std::move(locals);
  setup.watch = phases_of_(id);
  return std::make_unique<Lane>(std::make_unique<HostPlane>(setup));
}

std::unique_ptr<Lane> PlaneFactory::lane_across_hosts(SetId id, const ProcessSet& set,
                                                      Segment& staging, Feeds feeds,
                                                      std::vector<EventCount*> bells) const {
  CrossPlane::Setup setup{host_map(topology_, set.ranks)};
  setup.member = set.member;
  setup.memory = staging.data();
  setup.bytes = staging.size();
  setup.bells = std::move(bells);
  setup.wire =
      fabric_.open_wire()(set.ranks, 2 * static_cast<uint64_t>(id) + static_cast<uint64_t>(feeds));
  const CrossBlocks blocks = cross_blocks(config_, setup.hosts);
  setup.sizes = blocks.sizes;
  setup.sizes.most_chunk = setup.wire->most_bytes();
  setup.slots = blocks.slots;
  setup.silence = config_.stall_abort;
  setup.watch = phases_of_(id);
  return std::make_unique<Lane>(std::make_unique<CrossPlane>(std::move(setup)));
}

}  // namespace farandole
