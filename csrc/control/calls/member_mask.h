// SPDX-License-Identifier: Apache-2.0
// Sets of members (which are indices in a process set) as bit masks, and groups of ranks as parts of such masks.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "base/types.h"

namespace farandole {

class MemberMask {
 public:
  explicit MemberMask(int members = 0) : members_(members) {
    if (size() > kFew) many_.resize(size());
  }

  // Returns false if the member is already present.
  bool insert(int member) {
    uint64_t& word = words()[static_cast<size_t>(member) / 64];
    uint64_t bit = uint64_t{1} << (member % 64);
    if (word & bit) return false;
    word |= bit;
    ++count_;
    return true;
  }
  // Adds `count` members, with bits in `words` from `first_word` on. If one is present, adds none and returns false.
  bool insert_all(size_t first_word, const std::vector<uint64_t>& words, int count) {
    uint64_t* own = this->words() + first_word;
    for (size_t w = 0; w < words.size(); ++w) {
      if (own[w] & words[w]) return false;
    }
    for (size_t w = 0; w < words.size(); ++w) own[w] |= words[w];
    count_ += count;
    return true;
  }
  bool contains(int member) const {
    return (words()[static_cast<size_t>(member) / 64] >> (member % 64)) & 1;
  }
  int count() const { return count_; }
  bool empty() const { return count_ == 0; }
  bool full() const { return count_ == members_; }
  void clear() {
    std::fill_n(words(), size(), 0);
    count_ = 0;
  }

  std::vector<int32_t> members() const { return collect(0); }
  std::vector<int32_t> missing() const { return collect(~uint64_t{0}); }

 private:
  std::vector<int32_t> collect(uint64_t flip) const {
    std::vector<int32_t> found;
    for (size_t w = 0; w < size(); ++w) {
      for (uint64_t bits = words()[w] ^ flip; bits != 0; bits &= bits - 1) {
        auto member = static_cast<int32_t>(w * 64) + std::countr_zero(bits);
        if (member >= members_) break;  // `flip` has also set the bits after the last member
        found.push_back(member);
      }
    }
    return found;
  }
  static constexpr size_t kFew = 8;
  size_t size() const { return (static_cast<size_t>(members_) + 63) / 64; }  // in words
  uint64_t* words() { return size() > kFew ? many_.data() : few_.data(); }
  const uint64_t* words() const { return size() > kFew ? many_.data() : few_.data(); }

  int members_;
  int count_ = 0;
  std::array<uint64_t, kFew> few_{};  // large enough for most sets, and avoids following a pointer
  std::vector<uint64_t> many_;        // replaces few_ in larger sets
};

// Some of the members of a set, as words of the set's MemberMask.
struct MemberSlice {
  size_t first_word = 0;
  std::vector<uint64_t> words;
  int count = 0;
};

// Ranks that report together: those of a host and of its descendants in the tree of hosts. With a bit mask for each
// set, such a report is cheap to process.
struct RankGroup {
  std::vector<Rank> ranks;                  // ascending
  std::map<SetId, MemberSlice> slices;      // created on first use; ids of sets are never reused
  std::pair<SetId, int64_t> heard{-1, -1};  // set and time of the last report for all ranks

  // `members` holds the ranks of the set, in ascending order.
  const MemberSlice& slice_of(SetId set, const std::vector<Rank>& members) {
    auto [found, fresh] = slices.try_emplace(set);
    MemberSlice& slice = found->second;
    if (!fresh) return slice;
    for (Rank rank : ranks) {
      const int index = index_in(members, rank);
      if (index < 0) continue;
      const auto member = static_cast<size_t>(index);
      if (slice.words.empty()) slice.first_word = member / 64;
      slice.words.resize(member / 64 - slice.first_word + 1);
      slice.words.back() |= uint64_t{1} << (member % 64);
      ++slice.count;
    }
    return slice;
  }
};

}  // namespace farandole
