// SPDX-License-Identifier: Apache-2.0
// FARANDOLE_AUDIT between hosts: that it accuses nobody where all is well, and what it finds where a bit has changed.
#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/hierarchical/hierarchical_world.h"
#include "data/hierarchical/memory_network.h"

using namespace farandole;
using namespace farandole::check;

namespace {

// Two hosts of two members, and one block that all of them reduce.
struct Four {
  static constexpr size_t kElements = 1000;
  static constexpr Shape kShape = {{4096, 64, 0}, 2};
  static constexpr int kMembers = 4;

  Four()
      : network(std::make_shared<MemoryNetwork>(1, 3)),
        world(hierarchical_world(
            {0, 0, 1, 1}, kShape, [this](int member) { return network->counter(member); }, false, 1,
            &memory)) {
    begin_sums(world, kElements, inputs, outputs, parts, backends);
  }
  // Flips a bit of the first such bytes in the hosts' memory, where slots come before the audit's copies.
  void flip(const std::vector<float>& values, size_t element) {
    const auto wanted = std::as_bytes(std::span(values).subspan(element, 16));
    std::byte* const end = memory.data() + memory.size();
    std::byte* const found = std::search(memory.data(), end, wanted.begin(), wanted.end());
    CHECK(found != end);
    found[2] ^= std::byte{0x10};
  }
  // Steps all members until they have finished.
  void run() {
    for (int still = 0; still < 1000; ++still) {
      for (int member = 0; member < kMembers; ++member) {
        if (ended[member]) continue;
        const Progress progress = backends[member]->step();
        ended[member] = progress == Progress::kFinished;
        if (progress == Progress::kMoved) still = 0;
      }
    }
  }

  std::span<std::byte> memory;
  const std::shared_ptr<MemoryNetwork> network;
  const BackendWorld world;
  std::vector<float> inputs[kMembers], outputs[kMembers];
  Part parts[kMembers];
  std::unique_ptr<Backend> backends[kMembers];
  bool ended[kMembers] = {};
};

}  // namespace

TEST(an_audit_between_hosts_accuses_nobody) {
  for (size_t layout = 0; layout < kHosts.size(); ++layout) {
    const std::vector<int>& host = kHosts[layout];
    Random random(layout + 90);
    const std::vector<BucketSpec> buckets =
        buckets_of_every_kind(random, static_cast<int>(host.size()));
    const auto network = std::make_shared<MemoryNetwork>(layout, 5);
    const auto wire = [&network](int member) { return network->counter(member); };
    const BackendWorld world = hierarchical_world(host, kShapes[layout % 5], wire, true, 1);
    simulate(world, on_hosts(buckets, host), random);
  }
}

TEST(an_audit_between_hosts_accuses_nobody_in_threads) {
  for (size_t layout : {1, 4, 8}) {
    with_seed(700 + layout, [layout](uint64_t seed) {
      Random random(seed);
      const std::vector<int>& host = kHosts[layout];
      const auto network = std::make_shared<MemoryNetwork>(seed, 5);
      const auto wire = [&network](int member) { return network->counter(member); };
      run_threads(hierarchical_world(host, kShapes[seed % 5], wire, true, 2),
                  random_buckets(random, host, 60, 6, 500));
    });
  }
}

// The neighbour of whoever reduces it makes the host's sum again.
TEST(a_flipped_bit_in_an_input_staged_for_a_host_sum_is_found) {
  Four four;
  for (auto& backend : four.backends) CHECK(backend->step() == Progress::kMoved);  // they stage
  four.flip(four.inputs[1], 100);  // which member 0 reduces
  std::string text;
  try {
    four.run();
  } catch (const DataFault& fault) {
    text = fault.what();
    CHECK(fault.kind() == DataFault::Kind::kAudit);
    CHECK_EQ(fault.place().element, 100);
    CHECK_EQ(fault.place().member, 0);
  }
  CHECK(text.find("the sum of its host's inputs, looked at on member 1 on host 0") !=
        std::string::npos);
  CHECK(text.find("10200 (0x461f6000) if it is made again; member 0 on host 0 had made it") !=
        std::string::npos);
}

TEST(a_flipped_bit_in_a_result_is_found_by_who_reads_it) {
  Four four;
  std::vector<float> result;
  for (size_t i = 0; i < Four::kElements; ++i) result.push_back(static_cast<float>(4 * i + 60'000));
  const auto has = [&](size_t member) { return four.outputs[member] == result; };
  for (int turn = 0; has(0) == has(1); ++turn) {  // until one of the first host has got it
    four.backends[turn % Four::kMembers]->step();
    CHECK(turn < 1000);
  }
  four.flip(result, 100);
  const std::string late = has(0) ? "member 1" : "member 0";
  std::string text;
  try {
    four.run();
  } catch (const DataFault& fault) {
    text = fault.what();
    CHECK_EQ(fault.place().element, 100);
  }
  CHECK(text.find(" in the result on " + late + " on host 0") != std::string::npos);
}
