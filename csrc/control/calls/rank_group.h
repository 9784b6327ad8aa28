// SPDX-License-Identifier: Apache-2.0
// Ranks that report together, and which members of each process set they are: one report of theirs costs
// a few words, however many they are.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

#include "base/types.h"

namespace farandole {

// Some members of a set, as words of a MemberMask of that set.
struct MemberSlice {
  size_t first_word = 0;
  std::vector<uint64_t> words;
  int count = 0;
};

struct RankGroup {
  std::vector<Rank> ranks;              // ascending
  std::map<SetId, MemberSlice> slices;  // made when they are needed; a set's id never comes again

  // members: the set's ranks, ascending.
  const MemberSlice& slice_of(SetId set, const std::vector<Rank>& members) {
    auto [found, fresh] = slices.try_emplace(set);
    MemberSlice& slice = found->second;
    if (!fresh) return slice;
    for (Rank rank : ranks) {
      auto at = std::ranges::lower_bound(members, rank);
      if (at == members.end() || *at != rank) continue;
      auto member = static_cast<size_t>(at - members.begin());
      if (slice.words.empty()) slice.first_word = member / 64;
      slice.words.resize(member / 64 - slice.first_word + 1);
      slice.words.back() |= uint64_t{1} << (member % 64);
      ++slice.count;
    }
    return slice;
  }
};

}  // namespace farandole
