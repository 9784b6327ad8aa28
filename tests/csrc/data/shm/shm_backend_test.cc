// SPDX-License-Identifier: Apache-2.0
#include "data/shm/shm_backend.h"

#include <sys/stat.h>

#include "base/error.h"
#include "data/backend/backend_conformance.h"

using namespace farandole;
using namespace farandole::check;

namespace {

struct Shape {
  size_t block_bytes;
  int slots;
  size_t direct_bytes;
};

// Tiny blocks make many of them; direct and striped allreduce both occur.
constexpr Shape kShapes[] = {
    {320, 2, 200}, {320, 4, 0}, {1024, 4, 1000}, {4096, 2, 2000}, {64 * 1024, 4, 16384}};

BackendWorld world_of(int members, const Shape& shape, Buffers buffers = Buffers::kPrivate) {
  const auto make = [shape, buffers](const BackendWorld::Place& place) -> std::unique_ptr<Backend> {
    ShmSetup setup = {place.member,  place.members,     place.memory, place.bytes,
                      place.wakeups, shape.block_bytes, shape.slots,  shape.direct_bytes};
    if (buffers != Buffers::kPrivate) {
      setup.arenas = place.arenas;
      setup.locals = numbers_below(place.members);
    }
    return std::make_unique<ShmBackend>(setup);
  };
  return BackendWorld(members, ShmBackend::sizes(members, shape.block_bytes, shape.slots).bytes,
                      make, buffers);
}

constexpr Buffers kEverywhere[] = {Buffers::kPrivate, Buffers::kShared, Buffers::kMixed};

PartSpec allreduce(ReduceOp op, int64_t elements) {
  PartSpec spec = plain(Op::kAllreduce, elements, 1);
  spec.part.signature.reduce_op = op;
  return spec;
}

PartSpec sum(int64_t elements) { return allreduce(ReduceOp::kSum, elements); }

}  // namespace

TEST(every_op_dtype_and_shape) {
  for (int members = 1; members <= 5; ++members) {
    Random random(static_cast<uint64_t>(members));
    const std::vector<BucketSpec> buckets = buckets_of_every_kind(random, members);
    for (const Shape& shape : {kShapes[0], kShapes[2]}) {
      for (Buffers where : kEverywhere) simulate(world_of(members, shape, where), buckets, random);
    }
  }
}

TEST(random_buckets_in_random_order) {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    with_seed(seed, [](uint64_t s) {
      Random random(s);
      const int members = 1 + static_cast<int>(s % 5);
      const Shape& shape = kShapes[s % std::size(kShapes)];
      simulate(world_of(members, shape, kEverywhere[s % 3]),
               random_buckets(random, members, 20, 12, 700), random);
    });
  }
}

TEST(fused_buckets_of_a_thousand_tiny_tensors) {
  for (int members : {1, 2, 4}) {
    Random random(77);
    const BucketSpec bucket = tiny_tensors(random, members);
    simulate(world_of(members, {ShmSetup::kBlockBytes, 4, ShmSetup::kDirectBytes}),
             {bucket, bucket}, random);
    simulate(world_of(members, {1024, 2, 400}), {bucket, bucket}, random);
  }
}

TEST(threads_with_random_buckets) {
  for (int members = 2; members <= 4; ++members) {
    with_seed(static_cast<uint64_t>(100 + members), [members](uint64_t seed) {
      Random random(seed);
      const Shape& shape = kShapes[seed % std::size(kShapes)];
      for (Buffers where : kEverywhere) {
        run_threads(world_of(members, shape, where), random_buckets(random, members, 200, 6, 500));
      }
    });
  }
}

TEST(processes_with_random_buckets) {
  for (int members = 2; members <= 5; ++members) {
    with_seed(static_cast<uint64_t>(200 + members), [members](uint64_t seed) {
      Random random(seed);
      const Shape& shape = kShapes[seed % std::size(kShapes)];
      for (Buffers where : kEverywhere) {
        run_forks(world_of(members, shape, where), random_buckets(random, members, 150, 6, 500));
      }
    });
  }
}

TEST(large_tensors_in_blocks_of_default_size) {
  const std::vector<BucketSpec> buckets = {
      {sum(300'003)},
      {allreduce(ReduceOp::kMax, 400'000), sum(5), sum(170'001)},
      {plain(Op::kBroadcast, 200'001, 3)},
      {plain(Op::kAllgather, 100'001, 3)}};
  const Shape shape = {ShmSetup::kBlockBytes, ShmSetup::kSlots, ShmSetup::kDirectBytes};
  for (Buffers where : kEverywhere) {
    run_threads(world_of(3, shape, where), buckets);
    run_forks(world_of(3, shape, where), buckets);
  }
}

// An expectation that uses no kernel of ours.
TEST(sums_are_right) {
  constexpr int kMembers = 3;
  constexpr int64_t kElements = 5000;
  const BackendWorld world = world_of(kMembers, kShapes[2]);
  run_in_forks(kMembers, [&](int member) {
    std::vector<float> values(kElements);
    std::vector<int64_t> integers(kElements);
    for (int64_t i = 0; i < kElements; ++i) {
      values[static_cast<size_t>(i)] = static_cast<float>(i % 1000 + 1000 * member);
      integers[static_cast<size_t>(i)] = i * i * (member + 1);
    }
    std::vector<Part> parts = {allreduce(ReduceOp::kAverage, kElements).part, sum(kElements).part};
    parts[0].divisor = 2;
    parts[1].signature.dtype = DType::kInt64;
    parts[0].input = parts[0].output = reinterpret_cast<std::byte*>(values.data());
    parts[1].input = parts[1].output = reinterpret_cast<std::byte*>(integers.data());
    const std::unique_ptr<Backend> backend = world.backend(member);
    backend->begin(parts);
    drive(*backend, world.wakeup(member));
    for (int64_t i = 0; i < kElements; ++i) {
      CHECK_EQ(values[static_cast<size_t>(i)], static_cast<float>(3 * (i % 1000) + 3000) / 2);
      CHECK_EQ(integers[static_cast<size_t>(i)], 6 * i * i);
    }
  });
}

// The root need not wait for anybody, and a receiver only for the root.
TEST(broadcast_couples_receivers_to_the_root_alone) {
  const BackendWorld world = world_of(3, kShapes[2]);
  BucketSpec broadcast = {plain(Op::kBroadcast, 200, 3)};
  broadcast[0].part.signature.root = 0;
  std::vector<std::unique_ptr<Backend>> backends;
  for (int member = 0; member < 3; ++member) backends.push_back(world.backend(member));
  const MemberBucket root(broadcast, 0, 3);
  const MemberBucket second(broadcast, 1, 3);
  backends[1]->begin(second.parts());
  CHECK(!exhaust(*backends[1]));
  backends[0]->begin(root.parts());
  CHECK(exhaust(*backends[0]));
  CHECK(exhaust(*backends[1]));
  second.check();
}

TEST(staging_runs_ahead_by_the_number_of_slots) {
  constexpr int kSlots = 4;
  const BackendWorld world = world_of(2, {1024, kSlots, 0});
  const BucketSpec bucket = {sum(10'000)};
  const MemberBucket mine(bucket, 0, 2);
  const std::unique_ptr<Backend> backend = world.backend(0);
  backend->begin(mine.parts());
  for (int block = 0; block < kSlots; ++block) CHECK(backend->step() == Progress::kMoved);
  CHECK(backend->step() == Progress::kWaiting);
  CHECK(!backend->ready());
}

TEST(nothing_to_move_is_finished_at_once) {
  const BackendWorld world = world_of(2, kShapes[0]);
  const std::unique_ptr<Backend> backend = world.backend(0);
  backend->begin({});
  CHECK(backend->ready());
  CHECK(backend->step() == Progress::kFinished);
  const BucketSpec empty = {sum(0), plain(Op::kAllgather, 0, 2)};
  const MemberBucket bucket(empty, 0, 2);
  backend->begin(bucket.parts());
  CHECK(backend->step() == Progress::kFinished);
}

TEST(an_aborted_member_is_left_alone) {
  const BackendWorld world = world_of(2, kShapes[0]);
  const BucketSpec specs = {sum(5000)};
  MemberBucket aborted(specs, 0, 2);
  const MemberBucket other(specs, 1, 2);
  const std::unique_ptr<Backend> backends[] = {world.backend(0), world.backend(1)};
  backends[0]->begin(aborted.parts());
  backends[1]->begin(other.parts());
  for (int i = 0; i < 20; ++i) {
    backends[0]->step();
    backends[1]->step();
  }
  const size_t bytes = specs[0].part.signature.bytes();
  const std::byte* const output = aborted.parts()[0].output;
  const Bytes before(output, output + bytes);
  backends[0]->abort();
  CHECK(!exhaust(*backends[1]));
  CHECK(std::equal(before.begin(), before.end(), output));
  CHECK_THROWS(backends[0]->begin(aborted.parts()), ErrorCode::kInternal);
}

// Two members whose slots are allocated as they are used.
struct Pair {
  static constexpr size_t kBlock = 8192;
  static constexpr int kSlots = 4;

  Pair() {
    for (int member : {0, 1}) backends.push_back(world.backend(member));
  }
  size_t allocated() const {
    struct stat status;
    CHECK(fstat(staging.fd(), &status) == 0);
    return static_cast<size_t>(status.st_blocks) * 512;
  }

  const Segment staging = Segment::create("pair", ShmBackend::sizes(2, kBlock, kSlots), true);
  const BackendWorld world{
      2, 4096, [this](const BackendWorld::Place& place) -> std::unique_ptr<Backend> {
        ShmSetup setup = {place.member,  2,      staging.data(), staging.size(),
                          place.wakeups, kBlock, kSlots};
        setup.fd = staging.fd();
        return std::make_unique<ShmBackend>(setup);
      }};
  std::vector<std::unique_ptr<Backend>> backends;
};

TEST(a_pair_at_rest_holds_no_memory) {
  Pair pair;
  CHECK_EQ(pair.allocated(), 4096);
  Backend &receiver = *pair.backends[0], &sender = *pair.backends[1];
  for (int round = 0; round < 3; ++round) {
    const BucketSpec specs = {plain(Op::kBroadcast, 5000 + 100 * round, 2)};  // in three blocks
    const MemberBucket received = pair.world.bucket(specs, 0), sent = pair.world.bucket(specs, 1);
    receiver.begin(received.parts());
    sender.begin(sent.parts());
    CHECK(exhaust(sender));
    const size_t held = sender.held();
    CHECK(held > 0 && held <= Pair::kBlock * Pair::kSlots);
    CHECK(pair.allocated() >= 4096 + held);
    sender.rest();  // it may not: the receiver has read nothing yet
    CHECK_EQ(sender.held(), held);
    CHECK(exhaust(receiver));
    received.check();
    sent.check();
    CHECK_EQ(receiver.held(), 0);
    sender.rest();
    CHECK_EQ(sender.held(), 0);
    CHECK_EQ(pair.allocated(), 4096);
  }
}

TEST(a_second_bucket_waits_for_the_first) {
  const BackendWorld world = world_of(2, kShapes[0]);
  const BucketSpec specs = {sum(500)};
  const MemberBucket bucket(specs, 0, 2);
  const std::unique_ptr<Backend> backend = world.backend(0);
  backend->begin(bucket.parts());
  CHECK_THROWS(backend->begin(bucket.parts()), ErrorCode::kInternal);
}

TEST(too_little_memory_is_refused) {
  alignas(64) static std::byte memory[256 * 1024];
  EventCount wakeup;
  ShmSetup setup = {0, 2, memory, sizeof memory, {Wakeup(wakeup), Wakeup(wakeup)}, 1024, 4, 0};
  ShmBackend backend(setup);
  setup.bytes = ShmBackend::sizes(2, 1024, 4).bytes - 1;
  CHECK_THROWS(ShmBackend(setup), ErrorCode::kInternal);
}
