// SPDX-License-Identifier: Apache-2.0
// Carries out the shared-memory schedules of all members on labels instead of bytes: what is moved twice, never, or from
// the wrong place shows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <vector>

#include "check.h"
#include "data/backend/bucket.h"
#include "data/shm/shm_schedule.h"

namespace farandole::check {

struct Cut {
  size_t block_bytes;
  size_t direct_bytes;
};
inline std::vector<Part> parts_of(const BucketSpec& specs, int member) {
  static std::byte somewhere{};  // a plan never looks into buffers
  std::vector<Part> parts;
  for (const PartSpec& spec : specs) {
    parts.push_back(spec.part);
    parts.back().input = spec.part.has(member) ? &somewhere : nullptr;
  }
  return parts;
}

inline std::vector<Block> blocks_of(std::span<const Part> parts, int member, int members,
                                    const Cut& cut) {
  ShmSchedule plan(member, members, cut.block_bytes, cut.direct_bytes);
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
class ScheduleReplay {
 public:
  ScheduleReplay(const BucketSpec& specs, int members, const Cut& cut)
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
      case Op::kAllreduce:
      case Op::kReduce: expect(labels.size(), -1, 0, true); break;
      case Op::kReducescatter: expect(labels.size(), -1, row_sum(0, m, 1), true); break;
      case Op::kBroadcast: expect(labels.size(), spec.part.signature.root, 0, false); break;
      case Op::kAllgather:
        for (size_t from = 0; from < n; ++from) {
          expect(row_sum(from, 1, 1), static_cast<int>(from), 0, false);
        }
        break;
      case Op::kScatter:
        expect(row_sum(m, 1, 1), spec.part.signature.root, row_sum(0, m, 1), false);
        break;
      case Op::kAlltoall:
        for (size_t from = 0; from < n; ++from) {
          expect(row_sum(from * n + m, 1, 1), static_cast<int>(from), row_sum(from * n, m, 1),
                 false);
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

}  // namespace farandole::check
