// SPDX-License-Identifier: Apache-2.0
#include "data/shm/shm_schedule.h"

#include <cstdlib>
#include <new>

#include "check.h"
#include "data/backend/random_bucket.h"

using namespace farandole;
using namespace farandole::check;

namespace {

size_t g_allocations = 0;

struct Cut {
  size_t block_bytes;
  size_t direct_bytes;
};

std::vector<Block> blocks_of(std::span<const Part> parts, int member, int members, const Cut& cut) {
  ShmSchedule plan(member, members, cut.block_bytes, cut.direct_bytes);
  plan.start(parts);
  std::vector<Block> blocks(1);
  while (plan.next(blocks.back())) blocks.emplace_back();
  blocks.pop_back();
  return blocks;
}

Part float_part(Op op, std::vector<int64_t> shape) {
  static std::byte somewhere{};
  Part part;
  part.signature.op = op;
  part.signature.shape = std::move(shape);
  part.input = &somewhere;
  return part;
}

void refuses(Part part) {
  ShmSchedule plan(0, 2, 1024, 0);
  CHECK_THROWS(plan.start({&part, 1}), ErrorCode::kInternal);
}

}  // namespace

// Counted. Not inlined: gcc would see malloc and delete as a mismatched pair.
[[gnu::noinline]] void* operator new(size_t bytes) {
  ++g_allocations;
  if (void* memory = std::malloc(bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, size_t) noexcept { std::free(memory); }

TEST(tiny_tensors_share_a_block) {
  const std::vector<Part> parts(1000, float_part(Op::kAllreduce, {1}));
  const std::vector<Block> blocks = blocks_of(parts, 0, 2, {256 * 1024, 1024});
  CHECK_EQ(blocks.size(), 1);
  CHECK_EQ(blocks[0].owners, 2);
  CHECK_EQ(blocks[0].reduces.size(), 512);  // 4,000 bytes, cut at a cache line
}

TEST(a_small_block_is_reduced_by_everybody) {
  const std::vector<Part> parts = {float_part(Op::kAllreduce, {256})};
  const std::vector<Block> blocks = blocks_of(parts, 1, 2, {256 * 1024, 2048});
  CHECK_EQ(blocks.size(), 1);
  CHECK_EQ(blocks[0].owners, 0);
  CHECK_EQ(blocks[0].reduces.size(), 1);
  CHECK(blocks[0].receives.empty());
}

TEST(stripes_are_even_and_aligned) {
  const std::vector<Part> parts = {float_part(Op::kAllreduce, {300'000})};
  for (int member = 0; member < 3; ++member) {
    const std::vector<Block> blocks = blocks_of(parts, member, 3, {256 * 1024, 1024});
    CHECK_EQ(blocks.size(), 5);
    CHECK_EQ(blocks[0].reduces[0].slot % 64, 0);
    CHECK(blocks[0].reduces[0].bytes >= 87'296);
  }
}

TEST(alltoall_does_not_send_to_one_member_at_a_time) {
  Part part = float_part(Op::kAlltoall, {-1});
  part.rows.assign(9, 64);
  const std::vector<Part> parts = {part};
  for (int member = 0; member < 3; ++member) {
    const std::vector<Block> blocks = blocks_of(parts, member, 3, {256, 0});
    CHECK_EQ(blocks.size(), 3);
    CHECK_EQ(blocks[0].receives.size(), 1);
    CHECK_EQ(blocks[0].sources[0], (member + 2) % 3);
    CHECK_EQ(blocks[1].sources[0], (member + 1) % 3);
    CHECK_EQ(blocks[2].keeps.size(), 1);
  }
}

TEST(more_than_two_to_the_31_elements) {
  const int64_t elements = (int64_t{1} << 31) + 5;
  const std::vector<Part> parts = {float_part(Op::kAllreduce, {elements})};
  ShmSchedule plan(0, 2, 256 * 1024, 0);
  plan.start(parts);
  Block block;
  size_t bytes = 0;
  while (plan.next(block)) {
    CHECK_EQ(block.reduces[0].output, bytes);  // the first stripe
    bytes += block.reduces[0].bytes + (block.receives.empty() ? 0 : block.receives[0].bytes);
  }
  CHECK_EQ(bytes, static_cast<size_t>(elements) * 4);
}

TEST(planning_allocates_nothing_in_the_long_run) {
  Random random(5);
  const BucketSpec specs = random_bucket(random, 3, 40, 3000);
  const MemberBucket bucket(specs, 1, 3);
  ShmSchedule plan(1, 3, 1024, 128);
  Block block;
  for (int round = 0; round < 2; ++round) {
    g_allocations = 0;
    plan.start(bucket.parts());
    while (plan.next(block)) {
    }
  }
  CHECK_EQ(g_allocations, 0);
}

TEST(contradictions_are_refused) {
  Part part = float_part(Op::kAllreduce, {3});
  part.input = nullptr;
  refuses(part);
  part.present = {false, false};
  refuses(part);
  part.present = {true};
  refuses(part);
  part = float_part(Op::kBroadcast, {3});
  refuses(part);  // no root
  part.signature.root = 1;
  part.present = {true, false};
  refuses(part);
  part = float_part(Op::kAllgather, {-1, 2});
  refuses(part);  // no rows
  part.rows = {1, -1};
  refuses(part);
  part.rows = {1, 1};
  part.present = {true, false};
  refuses(part);  // rows of an absent member
  part.signature.dtype = DType::kUInt8;
  part.signature.shape = {-1};
  refuses(part);  // one byte of it
  part = float_part(Op::kReducescatter, {4});
  part.rows = {1, 2};
  refuses(part);
  part.rows = {1, 3};  // the first member keeps fewer rows
  refuses(part);
  part = float_part(Op::kAlltoall, {-1});
  part.rows = {1, 2};
  refuses(part);
  part = float_part(Op::kJoin, {});
  ShmSchedule plan(0, 2, 1024, 0);
  Block block;
  plan.start({&part, 1});
  CHECK_THROWS(plan.next(block), ErrorCode::kInternal);
}
