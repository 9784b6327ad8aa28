// SPDX-License-Identifier: Apache-2.0
// What holds for buffers in arenas only: that no byte of them is copied through slots, and who may touch
// them when. That they give the same results is in shm_backend_test.cc.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "data/backend/backend_conformance.h"
#include "data/shm/shm_backend.h"

using namespace farandole;
using namespace farandole::check;

namespace {

constexpr size_t kBlockBytes = 4096;
constexpr int kSlots = 4;

ShmSetup setup_of(const BackendWorld::Place& place) {
  ShmSetup setup = {place.member,  place.members, place.memory, place.bytes,
                    place.wakeups, kBlockBytes,   kSlots,       0};
  setup.arenas = place.arenas;
  setup.locals = numbers_below(place.members);
  return setup;
}

std::unique_ptr<Backend> backend_of(const BackendWorld::Place& place) {
  return std::make_unique<ShmBackend>(setup_of(place));
}

BackendWorld world_of(int members, Buffers buffers = Buffers::kShared) {
  return BackendWorld(members, ShmBackend::sizes(members, kBlockBytes, kSlots).bytes, backend_of,
                      buffers);
}

PartSpec sum_of(int64_t elements, bool in_place = true) {
  PartSpec spec = plain(Op::kAllreduce, elements, 1);
  spec.in_place = in_place;
  return spec;
}

struct World {
  World(int members, BucketSpec its_specs, Buffers where = Buffers::kShared)
      : specs(std::move(its_specs)), world(world_of(members, where)) {
    for (int member = 0; member < members; ++member) {
      backends.push_back(world.backend(member));
      buckets.push_back(
          std::make_unique<MemberBucket>(specs, member, members, world.memory_of(member)));
    }
  }
  void begin() {
    for (size_t i = 0; i < backends.size(); ++i) backends[i]->begin(buckets[i]->parts());
  }
  // Until nobody moves.
  void run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (auto& backend : backends) moved |= backend->step() == Progress::kMoved;
    }
  }
  const BucketSpec specs;
  BackendWorld world;
  std::vector<std::unique_ptr<Backend>> backends;
  std::vector<std::unique_ptr<MemberBucket>> buckets;
};

// Two process sets of the same two members, whose buffers lie side by side in one allocation.
struct TwoSets {
  static constexpr size_t kElements = 5000;

  TwoSets()
      : staging(
            Segment::create("backend-test", ShmBackend::sizes(2, kBlockBytes, kSlots).bytes, true)),
        world(
            2, staging.size(), [this](const BackendWorld::Place& place) { return make(place); },
            Buffers::kShared) {
    for (int set : {0, 1}) {
      second = set == 1;
      for (int member : {0, 1}) backends[set].push_back(world.backend(member));
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
  std::unique_ptr<Backend> make(const BackendWorld::Place& place) const {
    ShmSetup setup = setup_of(place);
    if (second) setup.memory = staging.data();
    return std::make_unique<ShmBackend>(setup);
  }
  void begin() {
    for (int set : {0, 1}) {
      for (size_t member : {0, 1}) {
        const Part& part = parts[set][member];
        std::fill_n(reinterpret_cast<float*>(part.output), kElements,
                    static_cast<float>(1 + member));
        backends[set][member]->begin({&part, 1});
      }
    }
  }
  void finish(int set) {
    bool ends[2] = {false, false};
    while (!ends[0] || !ends[1]) {
      for (size_t member : {0, 1}) ends[member] = ends[member] || exhaust(*backends[set][member]);
    }
  }

  const Segment staging;  // of the second set
  bool second = false;
  BackendWorld world;
  std::vector<std::unique_ptr<Backend>> backends[2];  // by set and member
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
    const bool alone = exhaust(*w.backends[0]);
    CHECK_EQ(alone, round == 0);  // it is staged until all have mapped the arena
    CHECK(exhaust(*w.backends[1]));
    CHECK(exhaust(*w.backends[2]));
    if (!alone) CHECK(exhaust(*w.backends[0]));
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
    for (size_t i = 0; i < steps; ++i) w.backends[random.below(3)]->step();
    w.backends[0]->abort();
    for (const Part& part : w.buckets[0]->parts()) {
      refill(part.output, part.signature.bytes());
    }
    for (int i = 0; i < 3; ++i) {
      exhaust(*w.backends[1]);
      exhaust(*w.backends[2]);
    }
    for (const Part& part : w.buckets[0]->parts()) {
      CHECK(untouched(part.output, part.signature.bytes()));
    }
  }
}

// Those who finish although a member has given up finish with the right result.
TEST(members_that_finish_beside_an_aborted_one_have_the_right_result) {
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
      whole = w.backends[random.below(2)]->step() == Progress::kFinished;
    }
    if (whole) break;
    w.backends[0]->abort();
    refill(w.buckets[0]->parts()[0].output, specs[0].part.signature.bytes());
    if (!exhaust(*w.backends[1])) continue;
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
      Backend& backend = *w.backends[random.below(2)][random.below(2)];
      if (backend.ready()) backend.step();
    }
    for (auto& backend : w.backends[0]) backend->abort();
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
    const BackendWorld world = world_of(2);
    const pid_t stopped = check::fork_bound();
    if (stopped == 0) {
      const std::unique_ptr<Backend> backend = world.backend(1);
      const MemberBucket bucket = world.bucket(specs, 1);
      backend->begin(bucket.parts());
      drive(*backend, world.wakeup(1));
      backend->begin(bucket.parts());
      for (int i = 0; i < steps;) {
        if (backend->step() == Progress::kMoved) ++i;
      }
      ::raise(SIGSTOP);
      exhaust(*backend);
      ::_exit(0);
    }
    const std::unique_ptr<Backend> backend = world.backend(0);
    const MemberBucket bucket = world.bucket(specs, 0);
    backend->begin(bucket.parts());
    drive(*backend, world.wakeup(0));
    backend->begin(bucket.parts());
    int status = 0;
    while (::waitpid(stopped, &status, WUNTRACED | WNOHANG) == 0) backend->step();
    CHECK(WIFSTOPPED(status));
    CHECK(!exhaust(*backend));
    backend->abort();
    const Part& part = bucket.parts()[0];
    refill(part.output, part.signature.bytes());
    ::kill(stopped, SIGCONT);
    CHECK_EQ(::waitpid(stopped, &status, 0), stopped);
    CHECK_EQ(status, 0);
    CHECK(untouched(part.output, part.signature.bytes()));
  }
}
