// SPDX-License-Identifier: Apache-2.0
// FARANDOLE_AUDIT inside a host: that it accuses nobody where all is well, and what it finds where a bit has changed.
#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/backend/backend_conformance.h"
#include "data/shm/shm_backend.h"

using namespace farandole;
using namespace farandole::check;

namespace {

constexpr size_t kBlockBytes = 4096;
constexpr int kSlots = 2;

// Members that share memory which the test can reach, too.
struct Audited {
  Audited(int members, int64_t every, size_t direct_bytes, Buffers buffers = Buffers::kPrivate)
      : bytes(ShmBackend::bytes_needed(members, kBlockBytes, kSlots, every)),
        world(
            members, bytes,
            [=, this](const BackendWorld::Place& place) -> std::unique_ptr<Backend> {
              memory = place.memory;
              ShmSetup setup = {place.member,  place.members, place.memory, place.bytes,
                                place.wakeups, kBlockBytes,   kSlots,       direct_bytes};
              if (buffers != Buffers::kPrivate) setup.arenas = place.arenas;
              for (int member = 0; member < place.members; ++member) {
                setup.locals.push_back(member);
                setup.names.push_back("member " + std::to_string(member));
              }
              setup.audit_every = every;
              setup.watch.audited = [this] { ++audits; };
              return std::make_unique<ShmBackend>(setup);
            },
            buffers) {}

  // The first place in shared memory with these bytes: the staging slots come before the audit's copies.
  std::byte* find(std::span<const std::byte> wanted) const {
    std::byte* const begin = memory;
    const auto found = std::search(begin, begin + bytes, wanted.begin(), wanted.end());
    CHECK(found != begin + bytes);
    return found;
  }

  const size_t bytes;
  mutable std::atomic<std::byte*> memory = nullptr;  // set by each member, to one value
  mutable std::atomic<int> audits = 0;
  const BackendWorld world;
};

// One block, which two members reduce, each a half, from and into buffers of the test's.
struct Pair {
  static constexpr size_t kElements = kBlockBytes / sizeof(float);

  explicit Pair(size_t direct_bytes = 0) : audited(2, 1, direct_bytes) {
    begin_sums(audited.world, kElements, inputs, outputs, parts, backends);
  }
  // Both take so many steps: stage, reduce and consume.
  void step(int steps) {
    for (; steps > 0; --steps) {
      for (auto& backend : backends) CHECK(backend->step() != Progress::kWaiting);
    }
  }
  std::span<const std::byte> half(const std::vector<float>& values, size_t which) const {
    return std::as_bytes(std::span(values)).subspan(which * kBlockBytes / 2, kBlockBytes / 2);
  }
  // What this member finds in its next step; empty: nothing.
  std::string found(size_t member, size_t element, int maker) {
    try {
      backends[member]->step();
    } catch (const DataFault& fault) {
      CHECK(fault.kind() == DataFault::Kind::kAudit && fault.code() == ErrorCode::kPeer);
      CHECK_EQ(fault.place().part, 0);
      CHECK_EQ(fault.place().element, element);
      CHECK_EQ(fault.place().member, maker);
      return fault.what();
    }
    return "";
  }

  Audited audited;
  std::vector<float> inputs[2], outputs[2];
  Part parts[2];
  std::unique_ptr<Backend> backends[2];
};

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST(an_audit_accuses_nobody_of_every_op_and_dtype) {
  for (int members = 1; members <= 5; ++members) {
    Random random(static_cast<uint64_t>(members) + 400);
    const std::vector<BucketSpec> buckets = buckets_of_every_kind(random, members);
    for (Buffers where : {Buffers::kPrivate, Buffers::kMixed}) {
      for (size_t direct_bytes : {0, 2000}) {
        const Audited audited(members, 1, direct_bytes, where);
        simulate(audited.world, buckets, random);
        CHECK_EQ(audited.audits > 0, members > 1);
      }
    }
  }
}

TEST(an_audit_accuses_nobody_between_threads) {
  for (int members = 2; members <= 4; ++members) {
    with_seed(static_cast<uint64_t>(500 + members), [members](uint64_t seed) {
      Random random(seed);
      const Audited audited(members, 1 + static_cast<int64_t>(seed % 3), 1000, Buffers::kMixed);
      run_threads(audited.world, random_buckets(random, members, 150, 6, 5000));
      CHECK(audited.audits > 0);
    });
  }
}

TEST(every_nth_bucket_that_reduces_is_audited_once_by_each_member) {
  PartSpec sum, copy;
  sum.part.signature.shape = copy.part.signature.shape = {10'000};
  sum.seed = copy.seed = 7;
  copy.part.signature.op = Op::kBroadcast;
  copy.part.signature.root = 0;
  std::vector<BucketSpec> buckets;
  for (int i = 0; i < 7; ++i) {
    buckets.push_back({copy});
    buckets.push_back({sum, copy});
  }
  const Audited audited(3, 3, 0);
  Random random(8);
  simulate(audited.world, buckets, random);
  CHECK_EQ(audited.audits, 2 * 3);
}

TEST(a_flipped_bit_in_a_staging_block_is_found_by_all) {
  Pair pair;
  pair.step(1);
  std::byte* const staged = pair.audited.find(pair.half(pair.inputs[0], 1));
  staged[4 * 100 + 2] ^= std::byte{0x10};  // element 100 of the half that member 1 reduces
  pair.step(1);
  for (size_t member : {0, 1}) {
    const std::string text = pair.found(member, Pair::kElements / 2 + 100, 1);
    // 612 + 10,612, and 548 + 10,612.
    CHECK(contains(text, "element 612 is 11160 (0x462e6000) in the result on member " +
                             std::to_string(member)));
    CHECK(contains(text, "but 11224 (0x462f6000) if it is made again; member 1 had made it"));
  }
}

TEST(a_flipped_bit_in_a_gradients_result_is_found_by_who_has_it) {
  Pair pair;
  pair.step(2);
  pair.outputs[1][Pair::kElements / 2 + 7] += 1;  // of its own half
  CHECK(contains(pair.found(1, Pair::kElements / 2 + 7, 1), "in the result on member 1"));
  CHECK(pair.found(0, 0, 0).empty());
  CHECK(pair.outputs[0][519] == 519 + 10'519);
}

TEST(a_flipped_bit_on_the_way_to_another_is_found_by_that_one) {
  Pair pair;
  pair.step(2);
  const std::vector<float> result(pair.outputs[0]);
  pair.audited.find(pair.half(result, 0))[4 * 30] ^= std::byte{1};  // member 0's slot
  CHECK(contains(pair.found(1, 30, 0), "in the result on member 1"));
  CHECK(pair.found(0, 0, 0).empty());
}

// Small blocks are reduced by every member.
TEST(a_flipped_bit_in_a_small_block_is_found) {
  Pair pair(1 << 20);
  pair.step(1);
  const auto first = pair.half(pair.inputs[1], 0);
  pair.audited.find(first)[4 * 3 + 1] ^= std::byte{0x80};
  pair.step(1);
  CHECK(contains(pair.found(0, 3, 0), "in the result on member 0"));
  CHECK(pair.found(1, 3, 1).empty());  // it has read its own input itself
}
