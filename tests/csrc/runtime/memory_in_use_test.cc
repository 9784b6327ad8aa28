// SPDX-License-Identifier: Apache-2.0
// Memory that calls under way read and write.
#include "runtime/calls/memory_in_use.h"

#include <array>
#include <utility>
#include <vector>

#include "check.h"

namespace farandole {
namespace {

struct Calls {
  Calls() {
    set.ranks = {0, 1};
    set.member = 0;
    sum.op = Op::kAllreduce;
    sum.dtype = DType::kUInt8;
  }

  // A call on `bytes` bytes; -1: no such buffer.
  Submission call(int input, int output, int64_t bytes) {
    Submission made;
    made.handle = ++calls;
    if (input >= 0) made.input = &memory[static_cast<size_t>(input)];
    if (output >= 0) made.output = &memory[static_cast<size_t>(output)];
    made.shape = {bytes};
    return made;
  }
  Handle user_of(const Submission& one) { return in_use.user_of(sum, one, set); }
  Submission add(const Submission& one) {
    in_use.add(sum, one, set);
    return one;
  }

  std::array<std::byte, 100> memory{};
  ProcessSet set;
  Signature sum;
  MemoryInUse in_use{0};
  Handle calls = 0;
};

TEST(a_writer_has_its_memory_to_itself) {
  Calls t;
  const Submission first = t.add(t.call(10, 10, 10));
  for (const auto& [begin, bytes] : {std::pair{10, 10}, {0, 11}, {19, 5}, {12, 3}, {0, 100}}) {
    CHECK_EQ(t.user_of(t.call(begin, begin, bytes)), first.handle);
    CHECK_EQ(t.user_of(t.call(begin, -1, bytes)), first.handle);
    CHECK_EQ(t.user_of(t.call(-1, begin, bytes)), first.handle);
  }
  for (const auto& [begin, bytes] : {std::pair{0, 10}, {20, 80}, {15, 0}}) {
    CHECK_EQ(t.user_of(t.call(begin, begin, bytes)), 0);
  }
  t.in_use.remove(first);
  CHECK_EQ(t.user_of(t.call(10, 10, 10)), 0);
}

TEST(readers_share_memory_that_none_writes) {
  Calls t;
  const Submission far = t.add(t.call(0, 90, 5));
  const Submission longest = t.add(t.call(0, 50, 40));
  const Submission inner = t.add(t.call(5, 95, 2));
  CHECK_EQ(t.user_of(t.call(0, -1, 40)), 0);
  CHECK_EQ(t.user_of(t.call(-1, 39, 1)), longest.handle);
  CHECK_EQ(t.user_of(t.call(-1, 40, 5)), 0);
  t.in_use.remove(longest);
  CHECK_EQ(t.user_of(t.call(-1, 39, 1)), 0);
  CHECK_EQ(t.user_of(t.call(-1, 6, 1)), inner.handle);
  t.in_use.remove(inner);
  CHECK_EQ(t.user_of(t.call(-1, 4, 3)), far.handle);
  t.in_use.remove(far);
  CHECK_EQ(t.user_of(t.call(0, 0, 100)), 0);
}

TEST(only_the_root_of_a_reduction_writes) {
  Calls t;
  t.sum.op = Op::kReduce;
  for (const Rank root : {0, 1}) {
    t.in_use.clear();
    t.sum.root = root;
    t.add(t.call(0, 0, 10));
    CHECK_EQ(t.user_of(t.call(0, -1, 10)) == 0, root == 1);
  }
}

TEST(the_root_of_a_broadcast_in_place_only_reads) {
  Calls t;
  t.sum.op = Op::kBroadcast;
  for (const Rank root : {0, 1}) {
    t.in_use.clear();
    t.sum.root = root;
    t.add(t.call(0, 0, 10));
    CHECK_EQ(t.user_of(t.call(0, 0, 10)) == 0, root == 0);
  }
}

TEST(an_allgather_into_memory_of_the_user_writes_the_rows_of_all) {
  Calls t;
  t.sum.op = Op::kAllgather;
  t.sum.shape = {-1};
  const Submission first = t.add(t.call(0, 20, 10));
  CHECK_EQ(t.user_of(t.call(39, -1, 1)), first.handle);
  CHECK_EQ(t.user_of(t.call(40, -1, 1)), 0);
}

TEST(copies_meet_a_writer_by_their_elements) {
  Calls t;
  const Submission writer = t.add(t.call(20, 20, 10));
  t.add(t.call(70, -1, 20));
  const auto base = reinterpret_cast<uintptr_t>(t.memory.data());
  using Numbers = std::vector<int64_t>;
  auto user_of = [&](uintptr_t at, const Numbers& shape, const Numbers& strides, bool writes) {
    return t.in_use.user_of({base + at, 2, shape, strides}, writes);
  };
  for (const bool writes : {false, true}) {
    CHECK_EQ(user_of(0, {5, 5}, {20, 2}, writes), writer.handle);
    CHECK_EQ(user_of(0, {5, 5}, {2, 20}, writes), writer.handle);
    CHECK_EQ(user_of(80, {5, 5}, {-20, -2}, writes), writer.handle);
    CHECK_EQ(user_of(20, {}, {}, writes), writer.handle);
    CHECK_EQ(user_of(19, {3}, {0}, writes), writer.handle);
    CHECK_EQ(user_of(1, {10}, {9}, writes), writer.handle);
    CHECK_EQ(user_of(10, {3, 5}, {20, 2}, writes), 0);  // rows before and behind it
    CHECK_EQ(user_of(18, {2, 1}, {12, 50}, writes), 0);
    CHECK_EQ(user_of(20, {0, 5}, {20, 2}, writes), 0);
  }
  CHECK_EQ(user_of(60, {2}, {28}, false), 0);
  CHECK_EQ(user_of(60, {2}, {28}, true), 2);
}

TEST(memory_of_gpus_is_not_tracked) {
  Calls t;
  Submission one = t.call(0, 0, 10);
  one.device = 0;
  t.add(one);
  CHECK_EQ(t.user_of(one), 0);
}

}  // namespace
}  // namespace farandole
