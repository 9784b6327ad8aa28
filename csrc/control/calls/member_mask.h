// SPDX-License-Identifier: Apache-2.0
// A set of member indices (positions in a process set), as bits.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

namespace farandole {

class MemberMask {
 public:
  explicit MemberMask(int members = 0)
      : members_(members), words_((static_cast<size_t>(members) + 63) / 64) {}

  // Returns false if the member was there already.
  bool insert(int member) {
    uint64_t& word = words_[static_cast<size_t>(member) / 64];
    uint64_t bit = uint64_t{1} << (member % 64);
    if (word & bit) return false;
    word |= bit;
    ++count_;
    return true;
  }
  // All of another one of the same size that begins at this word and has this many members; false: some
  // were there already, and nothing has changed.
  bool insert_all(size_t first_word, const std::vector<uint64_t>& words, int count) {
    for (size_t w = 0; w < words.size(); ++w) {
      if (words_[first_word + w] & words[w]) return false;
    }
    for (size_t w = 0; w < words.size(); ++w) words_[first_word + w] |= words[w];
    count_ += count;
    return true;
  }
  bool contains(int member) const {
    return (words_[static_cast<size_t>(member) / 64] >> (member % 64)) & 1;
  }
  int count() const { return count_; }
  bool empty() const { return count_ == 0; }
  bool full() const { return count_ == members_; }
  void clear() {
    std::fill(words_.begin(), words_.end(), 0);
    count_ = 0;
  }

  std::vector<int32_t> members() const { return collect(0); }
  std::vector<int32_t> missing() const { return collect(~uint64_t{0}); }

 private:
  std::vector<int32_t> collect(uint64_t flip) const {
    std::vector<int32_t> found;
    for (size_t w = 0; w < words_.size(); ++w) {
      for (uint64_t bits = words_[w] ^ flip; bits != 0; bits &= bits - 1) {
        auto member = static_cast<int32_t>(w * 64) + std::countr_zero(bits);
        if (member >= members_) break;  // beyond the last member: bits that flip made
        found.push_back(member);
      }
    }
    return found;
  }
  int members_;
  int count_ = 0;
  std::vector<uint64_t> words_;
};

}  // namespace farandole
