// SPDX-License-Identifier: Apache-2.0
// What holds for buffers in arenas only: that no byte of them is copied through slots, and who may touch
// them when. That they give the same results is in host_plane_test.cc.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "data/shm/host_plane.h"
#include "plane_conformance.h"

using namespace farandole;
using namespace farandole::check;

namespace {

constexpr size_t kBlockBytes = 4096;
constexpr int kSlots = 4;

PlaneWorld world_of(int members, Buffers buffers = Buffers::kShared) {
  const auto make = [](const PlaneWorld::Place& place) -> std::unique_ptr<Plane> {
    HostPlane::Setup setup = {place.member, place.members, place.memory, place.bytes,
                              place.bells,  kBlockBytes,   kSlots,       0};
    setup.arenas = place.arenas;
    for (int member = 0; member < place.members; ++member) setup.locals.push_back(member);
    return std::make_unique<HostPlane>(setup);
  };
  return PlaneWorld(members, HostPlane::bytes_needed(members, kBlockBytes, kSlots), make, buffers);
}

PartSpec sum_of(int64_t elements, bool in_place = true) {
  PartSpec spec;
  spec.part.signature.shape = {elements};
  spec.seed = static_cast<uint64_t>(elements) * 7919 + 1;
  spec.in_place = in_place;
  return spec;
}

struct World {
  World(int members, BucketSpec its_specs, Buffers where = Buffers::kShared)
      : specs(std::move(its_specs)), world(world_of(members, where)) {
    for (int member = 0; member < members; ++member) {
      planes.push_back(world.plane(member));
      buckets.push_back(
          std::make_unique<MemberBucket>(specs, member, members, world.memory_of(member)));
    }
  }
  void begin() {
    for (size_t i = 0; i < planes.size(); ++i) planes[i]->begin(buckets[i]->parts());
  }
  // Until nobody moves.
  void run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (auto& plane : planes) moved |= plane->step() == Progress::kMoved;
    }
  }
  const BucketSpec specs;
  PlaneWorld world;
  std::vector<std::unique_ptr<Plane>> planes;
  std::vector<std::unique_ptr<MemberBucket>> buckets;
};

// Two process sets of the same two members, whose buffers lie side by side in one allocation.
struct TwoSets {
  static constexpr size_t kElements = 5000;

  TwoSets()
      : staging(
            Segment::create("plane-test", HostPlane::bytes_needed(2, kBlockBytes, kSlots), true)),
        world(
            2, staging.size(), [this](const PlaneWorld::Place& place) { return make(place); },
            Buffers::kShared) {
    for (int set : {0, 1}) {
      second = set == 1;
      for (int member : {0, 1}) planes[set].push_back(world.plane(member));
    }
    constexpr size_t kBytes = kElements * sizeof(float);
    for (int member : {0, 1}) {
      std::byte* const memory = world.memory_of(member).arena->allocate(2 * kBytes);
      for (int set : {0, 1}) {
        Part part;
        part.signature.shape = {kElements};
        part.input = part.output = memory + static_cast<size_t>(set) * kBytes;
        parts[set].push_back(part);
      }
    }
  }
  std::unique_ptr<Plane> make(const PlaneWorld::Place& place) const {
    HostPlane::Setup setup = {place.member, place.members, place.memory, place.bytes,
                              place.bells,  kBlockBytes,   kSlots,       0};
    if (second) setup.memory = staging.data();
    setup.arenas = place.arenas;
    setup.locals = {0, 1};
    return std::make_unique<HostPlane>(setup);
  }
  void begin() {
    for (int set : {0, 1}) {
      for (size_t member : {0, 1}) {
        const Part& part = parts[set][member];
        std::fill_n(reinterpret_cast<float*>(part.output), kElements,
                    static_cast<float>(1 + member));
        planes[set][member]->begin({&part, 1});
      }
    }
  }
  void finish(int set) {
    bool ends[2] = {false, false};
    while (!ends[0] || !ends[1]) {
      for (size_t member : {0, 1}) ends[member] = ends[member] || exhaust(*planes[set][member]);
    }
  }

  const Segment staging;  // of the second set
  bool second = false;
  PlaneWorld world;
  std::vector<std::unique_ptr<Plane>> planes[2];  // by set and member
  std::vector<Part> parts[2];
};

void refill(std::byte* memory, size_t bytes) { std::memset(memory, 0x77, bytes); }
bool untouched(const std::byte* memory, size_t bytes) {
  return std::all_of(memory, memory + bytes, [](std::byte b) { return b == std::byte{0x77}; });
}

}  // namespace

// After a first bucket, in which the members find each other's arenas.
TEST(no_byte_of_a_large_allreduce_is_staged) {
  constexpr int64_t kElements = 30'000;
  for (int members : {2, 3, 4}) {
    World w(members, {sum_of(kElements)});
    w.begin();
    w.run();
    const auto before = w.world.arenas(0).mapped_bytes();
    w.begin();
    w.run();
    // Of each block, the input for others' stripes and the output that they write.
    const auto bytes = static_cast<uint64_t>(kElements) * sizeof(float);
    const uint64_t others = bytes - bytes / static_cast<uint64_t>(members);
    const uint64_t moved = w.world.arenas(0).mapped_bytes() - before;
    CHECK(moved + 2 * kBlockBytes >= 2 * others && moved <= 2 * others + 2 * kBlockBytes);
  }
}

TEST(private_buffers_are_staged) {
  World w(2, {sum_of(30'000)}, Buffers::kPrivate);
  w.begin();
  w.run();
  w.buckets[0]->check();
  CHECK_EQ(w.world.arenas(0).mapped_bytes(), 0);
}

// Peers read a broadcast's input itself: its root must not have it back before they have.
TEST(a_root_whose_memory_is_read_waits_for_the_readers) {
  PartSpec spec = sum_of(200, false);
  spec.part.signature.op = Op::kBroadcast;
  spec.part.signature.root = 0;
  World w(3, {spec});
  for (int round = 0; round < 2; ++round) {
    w.begin();
    const bool alone = exhaust(*w.planes[0]);
    CHECK_EQ(alone, round == 0);  // it is staged until all have mapped the arena
    CHECK(exhaust(*w.planes[1]));
    CHECK(exhaust(*w.planes[2]));
    if (!alone) CHECK(exhaust(*w.planes[0]));
  }
  for (auto& bucket : w.buckets) bucket->check();
}

// In every state of a bucket: a member's call fails, its buffers are filled anew, then the peers go on.
TEST(peers_change_no_byte_of_an_aborted_members_memory) {
  const BucketSpec specs = {sum_of(5000), sum_of(3000, false)};
  for (size_t steps = 0; steps < 60; ++steps) {
    World w(3, specs);
    w.begin();
    w.run();  // they know each other's arenas from here on
    w.begin();
    Random random(steps);
    for (size_t i = 0; i < steps; ++i) w.planes[random.below(3)]->step();
    w.planes[0]->abort();
    for (const Part& part : w.buckets[0]->parts()) {
      refill(part.output, part.signature.bytes());
    }
    for (int i = 0; i < 3; ++i) {
      exhaust(*w.planes[1]);
      exhaust(*w.planes[2]);
    }
    for (const Part& part : w.buckets[0]->parts()) {
      CHECK(untouched(part.output, part.signature.bytes()));
    }
  }
}

// Those who finish although a member has given up finish with the right result.
TEST(who_finishes_beside_an_aborted_member_has_the_right_result) {
  const BucketSpec specs = {sum_of(1000)};
  size_t finished = 0;
  for (size_t steps = 0; steps < 40; ++steps) {
    World w(2, specs);
    w.begin();
    w.run();
    for (size_t i = 0; i < 2; ++i)
      w.buckets[i] = std::make_unique<MemberBucket>(specs, static_cast<int>(i), 2,
                                                    w.world.memory_of(static_cast<int>(i)));
    w.begin();
    Random random(steps);
    bool whole = false;
    for (size_t i = 0; i < steps && !whole; ++i) {
      whole = w.planes[random.below(2)]->step() == Progress::kFinished;
    }
    if (whole) break;
    w.planes[0]->abort();
    refill(w.buckets[0]->parts()[0].output, specs[0].part.signature.bytes());
    if (!exhaust(*w.planes[1])) continue;
    ++finished;
    w.buckets[1]->check();
  }
  CHECK(finished > 0);
}

// Two sets with buffers in one allocation of each member; the first set's bucket is dropped.
TEST(a_dropped_bucket_takes_no_result_from_its_neighbour) {
  for (size_t steps = 0; steps < 60; ++steps) {
    TwoSets w;
    w.begin();  // in this round the members find each other's arenas
    w.finish(0);
    w.finish(1);
    w.begin();
    Random random(steps);
    for (size_t i = 0; i < steps; ++i) {
      Plane& plane = *w.planes[random.below(2)][random.below(2)];
      if (plane.ready()) plane.step();
    }
    for (auto& plane : w.planes[0]) plane->abort();
    w.finish(1);
    for (const Part& part : w.parts[1]) {
      const std::span sums(reinterpret_cast<const float*>(part.output), TwoSets::kElements);
      CHECK(std::ranges::all_of(sums, [](float sum) { return sum == 3.0F; }));
    }
  }
}

// The same with processes, one of which is stopped.
TEST(a_stopped_process_changes_nothing_when_it_goes_on) {
  const BucketSpec specs = {sum_of(50'000)};
  for (int steps : {7, 20, 41, 66}) {
    const PlaneWorld world = world_of(2);
    const pid_t stopped = ::fork();
    if (stopped == 0) {
      const std::unique_ptr<Plane> plane = world.plane(1);
      const MemberBucket bucket = world.bucket(specs, 1);
      plane->begin(bucket.parts());
      drive(*plane, world.bell(1));
      plane->begin(bucket.parts());
      for (int i = 0; i < steps;) {
        if (plane->step() == Progress::kMoved) ++i;
      }
      ::raise(SIGSTOP);
      exhaust(*plane);
      ::_exit(0);
    }
    const std::unique_ptr<Plane> plane = world.plane(0);
    const MemberBucket bucket = world.bucket(specs, 0);
    plane->begin(bucket.parts());
    drive(*plane, world.bell(0));
    plane->begin(bucket.parts());
    int status = 0;
    while (::waitpid(stopped, &status, WUNTRACED | WNOHANG) == 0) plane->step();
    CHECK(WIFSTOPPED(status));
    CHECK(!exhaust(*plane));
    plane->abort();
    const Part& part = bucket.parts()[0];
    refill(part.output, part.signature.bytes());
    ::kill(stopped, SIGCONT);
    CHECK_EQ(::waitpid(stopped, &status, 0), stopped);
    CHECK_EQ(status, 0);
    CHECK(untouched(part.output, part.signature.bytes()));
  }
}
