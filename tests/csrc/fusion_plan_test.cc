// SPDX-License-Identifier: Apache-2.0
#include "data/fusion_plan.h"

#include <cstdlib>
#include <new>
#include <set>

#include "bucket.h"
#include "check.h"
#include "lib/clock.h"

using namespace farandole;
using namespace farandole::check;

namespace {

size_t g_allocations = 0;

struct Cut {
  size_t block_bytes;
  size_t direct_bytes;
};
constexpr Cut kCuts[] = {{320, 0}, {384, 64}, {1024, 256}, {64 * 1024, 8192}};

std::vector<Part> parts_of(const BucketSpec& specs, int member) {
  static std::byte somewhere{};  // a plan never looks into buffers
  std::vector<Part> parts;
  for (const PartSpec& spec : specs) {
    parts.push_back(spec.part);
    parts.back().input = spec.part.has(member) ? &somewhere : nullptr;
  }
  return parts;
}

std::vector<Block> blocks_of(std::span<const Part> parts, int member, int members, const Cut& cut) {
  FusionPlan plan(member, members, cut.block_bytes, cut.direct_bytes);
  plan.start(parts);
  std::vector<Block> blocks(1);
  while (plan.next(blocks.back())) blocks.emplace_back();
  blocks.pop_back();
  return blocks;
}

// One byte that a plan moves: whose input or result, where.
struct Label {
  int member = -1;
  uint32_t part = 0;
  size_t offset = 0;
  bool is_result = false;
  bool operator==(const Label&) const = default;
};
using Slot = std::vector<Label>;

// Carries out all members' plans on labels instead of bytes.
class Rehearsal {
 public:
  Rehearsal(const BucketSpec& specs, int members, const Cut& cut)
      : specs_(specs), members_(members), slot_bytes_(cut.block_bytes) {
    for (int member = 0; member < members; ++member) {
      parts_.push_back(parts_of(specs, member));
      plans_.push_back(blocks_of(parts_.back(), member, members, cut));
      CHECK_EQ(plans_.back().size(), plans_.front().size());
      std::vector<Slot> outputs;
      for (const PartSpec& spec : specs) outputs.emplace_back(output_bytes(spec, member, members));
      outputs_.push_back(std::move(outputs));
    }
  }

  void run() {
    for (size_t block = 0; block < plans_.front().size(); ++block) {
      slots_.assign(static_cast<size_t>(members_), Slot(slot_bytes_));
      for (int member = 0; member < members_; ++member) stage(member, plan(member)[block]);
      for (int member = 0; member < members_; ++member) reduce(member, plan(member)[block]);
      for (int member = 0; member < members_; ++member) consume(member, plan(member)[block]);
    }
    for (int member = 0; member < members_; ++member) {
      for (uint32_t part = 0; part < specs_.size(); ++part) check_output(member, part);
    }
  }

 private:
  const std::vector<Block>& plan(int member) const { return plans_[static_cast<size_t>(member)]; }
  Slot& slot(int member) { return slots_[static_cast<size_t>(member)]; }
  Slot& output(int member, uint32_t part) { return outputs_[static_cast<size_t>(member)][part]; }

  void check_range(const Range& range) const {
    const size_t element = specs_[range.part].element();
    CHECK(range.bytes > 0);
    CHECK(range.slot + range.bytes <= slot_bytes_);
    CHECK_EQ(range.slot % element, 0);
    CHECK_EQ(range.bytes % element, 0);
  }

  // Nothing may be written twice.
  static void write(Label& place, const Label& label) {
    CHECK_EQ(place.member, -1);
    place = label;
  }

  void stage(int member, const Block& block) {
    for (const Range& range : block.sends) {
      check_range(range);
      CHECK(specs_[range.part].part.has(member));
      CHECK(range.input + range.bytes <= input_bytes(specs_[range.part], member, members_));
      for (size_t i = 0; i < range.bytes; ++i) {
        write(slot(member)[range.slot + i], {member, range.part, range.input + i, false});
      }
    }
    for (const Range& range : block.keeps) {
      for (size_t i = 0; i < range.bytes; ++i) {
        write(output(member, range.part).at(range.output + i),
              {member, range.part, range.input + i, false});
      }
    }
  }

  void reduce(int member, const Block& block) {
    for (const Range& range : block.reduces) {
      check_range(range);
      for (int other = 0; other < members_; ++other) {
        if (other == member || !specs_[range.part].part.has(other)) continue;
        for (size_t i = 0; i < range.bytes; ++i) {
          CHECK(slot(other)[range.slot + i] == Label(other, range.part, range.input + i, false));
        }
      }
      for (size_t i = 0; i < range.bytes; ++i) {
        const Label result = {member, range.part, range.input + i, true};
        write(output(member, range.part).at(range.output + i), result);
        if (block.owners > 0) write(slot(member)[range.slot + i], result);
      }
    }
    CHECK(block.reduces.empty() || block.combines);
  }

  void consume(int member, const Block& block) {
    const std::set<int32_t> sources(block.sources.begin(), block.sources.end());
    for (const Range& range : block.receives) {
      check_range(range);
      CHECK(range.member != member);
      CHECK(sources.contains(range.member));
      for (size_t i = 0; i < range.bytes; ++i) {
        const Label& label = slot(range.member)[range.slot + i];
        CHECK_EQ(label.member, range.member);
        CHECK_EQ(label.offset, range.input + i);
        CHECK_EQ(label.is_result, block.combines);
        write(output(member, range.part).at(range.output + i), label);
      }
    }
  }

  // Where the byte must have come from, by the collective's definition.
  void check_output(int member, uint32_t part) {
    const PartSpec& spec = specs_[part];
    const auto m = static_cast<size_t>(member);
    const auto n = static_cast<size_t>(members_);
    const Slot& labels = output(member, part);
    size_t at = 0;
    const auto expect = [&](size_t bytes, int from, size_t offset, bool is_result) {
      for (size_t i = 0; i < bytes; ++i, ++at) {
        CHECK_EQ(labels.at(at).part, part);
        CHECK_EQ(labels.at(at).offset, offset + i);
        CHECK_EQ(labels.at(at).is_result, is_result);
        if (is_result) CHECK(labels.at(at).member >= 0);
        if (!is_result) CHECK_EQ(labels.at(at).member, from);
      }
    };
    const auto row_sum = [&](size_t begin, size_t count, size_t step) {
      size_t rows = 0;
      for (size_t i = 0; i < count; ++i) rows += spec.rows(begin + i * step);
      return rows * spec.row_bytes();
    };
    switch (spec.part.signature.op) {
      case Op::kAllreduce: expect(labels.size(), -1, 0, true); break;
      case Op::kReducescatter: expect(labels.size(), -1, row_sum(0, m, 1), true); break;
      case Op::kBroadcast: expect(labels.size(), spec.part.signature.root, 0, false); break;
      case Op::kAllgather:
        for (size_t from = 0; from < n; ++from) {
          expect(row_sum(from, 1, 1), static_cast<int>(from), 0, false);
        }
        break;
      case Op::kAlltoall:
        for (size_t from = 0; from < n; ++from) {
          expect(row_sum(from * n + m, 1, 1), static_cast<int>(from), row_sum(from * n, m, 1), false);
        }
        break;
      default: break;
    }
    CHECK_EQ(at, labels.size());
  }

  const BucketSpec& specs_;
  const int members_;
  const size_t slot_bytes_;
  std::vector<std::vector<Part>> parts_;
  std::vector<std::vector<Block>> plans_;
  std::vector<Slot> slots_;
  std::vector<std::vector<Slot>> outputs_;  // by member and part
};

Part float_part(Op op, std::vector<int64_t> shape) {
  static std::byte somewhere{};
  Part part;
  part.signature.op = op;
  part.signature.shape = std::move(shape);
  part.input = &somewhere;
  return part;
}

void refuses(Part part) {
  FusionPlan plan(0, 2, 1024, 0);
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

TEST(every_byte_comes_from_where_it_should) {
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    try {
      Random random(seed);
      const int members = 1 + static_cast<int>(seed % 5);
      const BucketSpec specs = random_bucket(random, members, 15, 500);
      Rehearsal(specs, members, kCuts[seed % std::size(kCuts)]).run();
    } catch (...) {
      std::fprintf(stderr, "failed with seed %llu\n", static_cast<unsigned long long>(seed));
      throw;
    }
  }
}

TEST(tiny_tensors_share_a_block) {
  const std::vector<Part> parts(1000, float_part(Op::kAllreduce, {1}));
  const std::vector<Block> blocks = blocks_of(parts, 0, 2, {256 * 1024, 1024});
  CHECK_EQ(blocks.size(), 1);
  CHECK_EQ(blocks[0].owners, 2);
  CHECK_EQ(blocks[0].reduces.size(), 512);  // 4,000 bytes, cut at a cache line
}

TEST(a_small_block_is_reduced_by_everybody) {
  const std::vector<Part> parts = {float_part(Op::kAllreduce, {256})};
  const std::vector<Block> blocks = blocks_of(parts, 1, 2, {256 * 1024, 1024});
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
  FusionPlan plan(0, 2, 256 * 1024, 0);
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
  const std::vector<Part> parts = parts_of(specs, 1);
  FusionPlan plan(1, 3, 1024, 128);
  Block block;
  for (int round = 0; round < 2; ++round) {
    g_allocations = 0;
    plan.start(parts);
    while (plan.next(block)) {
    }
  }
  CHECK_EQ(g_allocations, 0);
}

TEST(planning_is_cheap) {
  const std::vector<Part> parts(1000, float_part(Op::kAllreduce, {256}));
  FusionPlan plan(0, 4, 256 * 1024, 8192);
  std::vector<Block> blocks(4);
  int64_t best = INT64_MAX;
  for (int round = 0; round < 20; ++round) {
    const int64_t start = now_ns();
    plan.start(parts);
    for (Block& block : blocks) CHECK(plan.next(block));
    best = std::min(best, now_ns() - start);
  }
  std::fprintf(stderr, "planned 1000 parts of 4 members: %.0f ns each\n",
               static_cast<double>(best) / 1000);
  CHECK(best < 1'000'000);
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
  part = float_part(Op::kReducescatter, {4});
  part.rows = {1, 2};
  refuses(part);
  part = float_part(Op::kAlltoall, {-1});
  part.rows = {1, 2};
  refuses(part);
  part = float_part(Op::kJoin, {});
  FusionPlan plan(0, 2, 1024, 0);
  Block block;
  plan.start({&part, 1});
  CHECK_THROWS(plan.next(block), ErrorCode::kInternal);
}
