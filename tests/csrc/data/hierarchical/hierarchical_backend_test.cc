// SPDX-License-Identifier: Apache-2.0
// The backend across hosts, on hosts that are groups of threads.
#include "data/hierarchical/hierarchical_backend.h"

#include <memory>
#include <vector>

#include "base/error.h"
#include "data/hierarchical/hierarchical_world.h"
#include "data/hierarchical/memory_network.h"

using namespace farandole;
using namespace farandole::check;

namespace {

class Hosts {
 public:
  Hosts(const std::vector<int>& host, const Shape& shape, uint64_t seed)
      : network(std::make_shared<MemoryNetwork>(seed, 5)),
        world(hierarchical_world(host, shape,
                                 [this](int member) { return network->counter(member); })) {}

  const std::shared_ptr<MemoryNetwork> network;
  const BackendWorld world;
};

// Bytes over all wires for one bucket of this part alone.
size_t crossing(const PartSpec& spec, const std::vector<int>& host, const Shape& shape) {
  Hosts hosts(host, shape, 3);
  Random random(4);
  simulate(hosts.world, on_hosts({{spec}}, host), random);
  return hosts.network->bytes();
}

}  // namespace

TEST(every_op_dtype_and_shape) {
  for (size_t layout = 0; layout < kHosts.size(); ++layout) {
    const std::vector<int>& host = kHosts[layout];
    const int members = static_cast<int>(host.size());
    Random random(layout + 1);
    const std::vector<BucketSpec> buckets = buckets_of_every_kind(random, members);
    Hosts hosts(host, kShapes[layout % 5], layout);
    simulate(hosts.world, on_hosts(buckets, host), random);
  }
}

TEST(random_buckets_in_random_order) {
  for (uint64_t seed = 1; seed <= 52; ++seed) {
    with_seed(seed, [](uint64_t s) {
      Random random(s);
      const std::vector<int>& host = kHosts[s % kHosts.size()];
      Hosts hosts(host, kShapes[s % std::size(kShapes)], s);
      simulate(hosts.world, random_buckets(random, host, 20, 12, 700), random);
    });
  }
}

TEST(fused_buckets_of_a_thousand_tiny_tensors) {
  const std::vector<int> host = {0, 0, 1};
  Random random(77);
  const BucketSpec bucket = tiny_tensors(random, 3);
  for (const Shape& shape : {Shape{{}, 4}, kShapes[1]}) {
    Hosts hosts(host, shape, 1);
    simulate(hosts.world, on_hosts({bucket, bucket}, host), random);
  }
}

TEST(large_tensors_in_blocks_of_default_size) {
  for (const std::vector<int>& host : {kHosts[1], kHosts[5]}) {
    const int n = static_cast<int>(host.size());
    Hosts hosts(host, {{}, HierarchicalBackend::kSlots}, 9);
    run_threads(hosts.world, on_hosts({{plain(Op::kAllreduce, 700'003, n)},
                                       {plain(Op::kAllreduce, 600'001, n, DType::kFloat16)},
                                       {plain(Op::kBroadcast, 500'001, n)},
                                       {plain(Op::kAllgather, 100'001, n)},
                                       {plain(Op::kAlltoall, 30'001, n)},
                                       {plain(Op::kReducescatter, 400'000, n)}},
                                      host));
  }
}

// The same inputs in other blocks, in other buckets and with other delays: the same bits.
TEST(bits_do_not_depend_on_blocks_or_delays) {
  const std::vector<int>& host = kHosts[7];
  BucketSpec fused;
  for (int64_t size : {3000, 17, 900}) fused.push_back(plain(Op::kAllreduce, size, 6));
  std::vector<BucketSpec> alone;
  for (const PartSpec& spec : fused) alone.push_back({spec});
  for (const Shape& shape : kShapes) {  // each checks the bits that the layout defines
    for (uint64_t seed = 1; seed <= 3; ++seed) {
      Random random(seed);
      Hosts together(host, shape, seed);
      simulate(together.world, on_hosts({fused}, host), random);
      Hosts apart(host, shape, seed);
      simulate(apart.world, on_hosts(alone, host), random);
    }
  }
}

TEST(links_carry_each_byte_once) {
  constexpr Shape kUsual = {{64 * 1024, 4096, 1024}, 4};
  constexpr size_t kElements = 96 * 1024, kBytes = 4 * kElements;
  const std::vector<int>& two = kHosts[1];
  const std::vector<int>& three = kHosts[7];
  // Allreduce: twice (n - 1) / n of the bytes out of each of n hosts.
  CHECK_EQ(crossing(plain(Op::kAllreduce, kElements, 4), two, kUsual), 2 * kBytes);
  CHECK_EQ(crossing(plain(Op::kAllreduce, kElements, 6), three, kUsual), 4 * kBytes);
  // 16-bit floats: partial sums have 32 bits, results 16.
  CHECK_EQ(crossing(plain(Op::kAllreduce, 2 * kElements, 4, DType::kFloat16), two, kUsual),
           3 * kBytes);
  // Broadcast and allgather: into each other host once. Alltoall: what members of other hosts get.
  CHECK_EQ(crossing(plain(Op::kBroadcast, kElements, 6), three, kUsual), 2 * kBytes);
  CHECK_EQ(crossing(plain(Op::kAllgather, kElements, 4), two, kUsual), 4 * kBytes);
  CHECK_EQ(crossing(plain(Op::kAlltoall, kElements, 4), two, kUsual), 8 * kBytes);
  CHECK_EQ(crossing(plain(Op::kScatter, kElements, 4), two, kUsual), kBytes / 2);
  // Reduce: one partial sum from each host but the root's.
  CHECK_EQ(crossing(plain(Op::kReduce, kElements, 6), three, kUsual), 2 * kBytes);
  // Reducescatter: one partial sum of every share, from each host without it.
  CHECK_EQ(crossing(plain(Op::kReducescatter, kElements, 4), two, kUsual), kBytes);
}

TEST(a_silent_wire_is_an_error) {
  const std::vector<int>& host = kHosts[0];
  HostMap map(host);
  alignas(64) static std::byte memory[64 * 1024];
  EventCount wakeup;
  HierarchicalBackend::Setup setup{map};
  setup.memory = memory;
  setup.bytes = sizeof memory;
  setup.wakeups = {Wakeup(wakeup)};
  const auto network = std::make_shared<MemoryNetwork>(1, 1);
  setup.wire = network->counter(0);
  setup.sizes = {1024, 64, 0};
  setup.silence = 0.05;
  for (size_t i = 0; i < host.size(); ++i)
    setup.names.push_back("the one called " + std::to_string(i));
  HierarchicalBackend backend(std::move(setup));
  const BucketSpec specs = {plain(Op::kAllreduce, 100, 2)};
  const MemberBucket bucket(specs, 0, 2);
  backend.begin(bucket.parts());
  CHECK(contains(CHECK_THROWS(drive(backend, wakeup), ErrorCode::kStall), "the one called "));
  backend.abort();
  CHECK_THROWS(backend.begin(bucket.parts()), ErrorCode::kInternal);
}

TEST(too_little_memory_is_refused) {
  alignas(64) static std::byte memory[64 * 1024];
  EventCount wakeup;
  HierarchicalBackend::Setup setup{HostMap({0, 0, 1})};
  setup.memory = memory;
  setup.bytes = HierarchicalBackend::bytes_needed(2, 1024, 4) - 1;
  setup.wakeups = {Wakeup(wakeup), Wakeup(wakeup)};
  setup.sizes = {1024, 64, 0};
  setup.slots = 4;
  CHECK_THROWS(HierarchicalBackend(std::move(setup)), ErrorCode::kInternal);
}
