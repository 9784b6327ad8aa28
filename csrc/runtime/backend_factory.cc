// SPDX-License-Identifier: Apache-2.0
#include "runtime/backend_factory.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "data/hierarchical/hierarchical_backend.h"
#include "data/shm/shm_backend.h"

namespace farandole {
namespace {

HostMap host_map(const Topology& topology, const std::vector<Rank>& ranks) {
  std::vector<int> host;
  for (Rank rank : ranks) host.push_back(topology.node[static_cast<size_t>(rank)]);
  return HostMap(host);
}

// Returns the unique number of a set's wire, which is the same on all members.
uint64_t wire_number(SetId id, Feeds feeds) {
  const int64_t set = is_pair(id) ? -2 * int64_t{id} - 1 : 2 * int64_t{id};
  return 2 * static_cast<uint64_t>(set) + static_cast<uint64_t>(feeds);
}

// Returns the block size that is wanted before the number of members is taken into account. A pair's messages are as
// fast with small blocks, which need less memory.
size_t usual_block_bytes(size_t wanted, SetId id) {
  constexpr size_t kMostOfPair = 256 << 10;
  return is_pair(id) ? std::min(wanted, kMostOfPair) : wanted;
}

// Returns the configured block size, raised if necessary so that ShmSchedule can cut a block for so many members.
size_t shm_block_bytes(const Config& config, SetId id, int members) {
  const size_t least = ShmSchedule::kAlignment * static_cast<size_t>(members);
  const size_t usual = usual_block_bytes(static_cast<size_t>(config.block_bytes), id);
  return round_up(std::max(usual, least), ShmSchedule::kAlignment);
}

struct HierarchicalBlocks {
  HierarchicalSchedule::Sizes sizes;
  int slots;
};

// Uses smaller blocks and more slots than inside a host, so that some blocks are sent while others are reduced. In jobs
// of many hosts, uses larger blocks instead, so that a host's chunk of a stripe is not tiny.
HierarchicalBlocks hierarchical_blocks(const Config& config, SetId id, const HostMap& hosts) {
  constexpr size_t kSmaller = 2, kMore = 4;
  constexpr size_t kChunk = 4096, kManyHosts = 2 << 20;
  const auto members = static_cast<size_t>(hosts.members());
  const auto chunks = static_cast<size_t>(hosts.hosts()) * static_cast<size_t>(hosts.stripes());
  const size_t usual = usual_block_bytes(static_cast<size_t>(config.block_bytes) / kSmaller, id);
  const size_t wanted = std::max(
      {usual, std::min(chunks * kChunk, kManyHosts), HierarchicalSchedule::kAlignment * members});
  HierarchicalBlocks blocks;
  blocks.sizes.block_bytes = std::min(round_up(wanted, HierarchicalSchedule::kAlignment),
                                      HierarchicalSchedule::kMostBlockBytes);
  const auto slots = static_cast<size_t>(config.staging_slots);
  const size_t staged = kMore * slots * usual;  // total bytes of all slots
  blocks.slots = static_cast<int>(std::max(slots, staged / blocks.sizes.block_bytes));
  return blocks;
}

}  // namespace

SegmentSize BackendFactory::staging_size(SetId id, const std::vector<Rank>& ranks) const {
  const HostMap hosts = host_map(topology_, ranks);
  if (hosts.hosts() == 1) {
    const SegmentSize size =
        ShmBackend::sizes(hosts.members(), shm_block_bytes(config_, id, hosts.members()),
                          static_cast<int>(config_.staging_slots));
    return is_pair(id) ? size : SegmentSize(size.bytes + Cell::bytes(hosts.members()));
  }
  const HierarchicalBlocks blocks = hierarchical_blocks(config_, id, hosts);
  return HierarchicalBackend::bytes_needed(static_cast<int>(topology_.locals_among(ranks).size()),
                                           blocks.sizes.block_bytes, blocks.slots);
}

// Returns the ranks with their hosts, for error texts.
std::vector<std::string> BackendFactory::names_of(const ProcessSet& set) const {
  std::vector<std::string> names;
  for (const Rank rank : set.ranks) {
    names.push_back("rank " + std::to_string(rank) + " on " +
                    fabric_.host_names()[static_cast<size_t>(rank)]);
  }
  return names;
}

std::unique_ptr<Backend> BackendFactory::open_backend(SetId id, const ProcessSet& set,
                                                      Segment& staging, Feeds feeds) const {
  std::vector<int> locals = topology_.locals_among(set.ranks);
  std::vector<Wakeup> wakeups;
  for (int local : locals) wakeups.push_back(fabric_.control().wakeup(local));
  if (wakeups.size() < set.ranks.size()) {
    return backend_across_hosts(id, set, staging, feeds, std::move(wakeups));
  }
  ShmSetup setup;
  setup.member = set.member;
  setup.members = set.members();
  setup.memory = staging.data();
  setup.bytes = staging.size();
  setup.block_bytes = shm_block_bytes(config_, id, setup.members);
  setup.slots = static_cast<int>(config_.staging_slots);
  setup.wakeups = std::move(wakeups);
  setup.arenas = fabric_.arenas();
  setup.locals = std::move(locals);
  if (is_pair(id)) setup.fd = staging.fd();
  setup.watch = phases_of_(id);
  return std::make_unique<ShmBackend>(setup);
}

// The cell is at the end of the staging memory.
std::shared_ptr<Cell> BackendFactory::open_cell(SetId id, const ProcessSet& set,
                                                const std::shared_ptr<Segment>& staging,
                                                Spin spin) const {
  const size_t bytes = Cell::bytes(set.members());
  const bool together = topology_.locals_among(set.ranks).size() == set.ranks.size();
  if (bytes == 0 || !together || is_pair(id)) return nullptr;
  return std::make_shared<Cell>(
      Cell::Setup{set.member, set.members(), staging, staging->size() - bytes, spin});
}

std::unique_ptr<Backend> BackendFactory::backend_across_hosts(SetId id, const ProcessSet& set,
                                                              Segment& staging, Feeds feeds,
                                                              std::vector<Wakeup> wakeups) const {
  HierarchicalBackend::Setup setup{host_map(topology_, set.ranks)};
  setup.member = set.member;
  setup.memory = staging.data();
  setup.bytes = staging.size();
  setup.wakeups = std::move(wakeups);
  setup.wire = fabric_.open_wire()(set.ranks, wire_number(id, feeds));
  const HierarchicalBlocks blocks = hierarchical_blocks(config_, id, setup.hosts);
  setup.sizes = blocks.sizes;
  setup.sizes.most_chunk = setup.wire->most_bytes();
  setup.slots = blocks.slots;
  setup.silence = config_.silence_limit();
  setup.names = names_of(set);
  setup.watch = phases_of_(id);
  return std::make_unique<HierarchicalBackend>(std::move(setup));
}

}  // namespace farandole
