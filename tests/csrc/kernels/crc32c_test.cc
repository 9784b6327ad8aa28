// SPDX-License-Identifier: Apache-2.0
#include "kernels/crc32c.h"

#include <string_view>
#include <vector>

#include "check.h"
#include "random.h"

using namespace farandole;
using namespace farandole::check;

namespace {

// One bit after the other, as the polynomial defines it.
uint32_t by_bits(const unsigned char* at, size_t bytes) {
  uint32_t sum = ~uint32_t{0};
  for (size_t i = 0; i < bytes; ++i) {
    sum ^= at[i];
    for (int bit = 0; bit < 8; ++bit) sum = (sum >> 1) ^ (sum & 1 ? 0x82f63b78 : 0);
  }
  return ~sum;
}

std::vector<unsigned char> noise(size_t bytes) {
  Random random(bytes);
  std::vector<unsigned char> data(bytes);
  for (unsigned char& byte : data) byte = static_cast<unsigned char>(random.below(256));
  return data;
}

}  // namespace

// Of RFC 3720, B.4, and the usual one.
TEST(known_sums) {
  const std::vector<unsigned char> zeros(32, 0), ones(32, 0xff);
  constexpr std::string_view kDigits = "123456789";
  for (const auto sum : {kernels::crc32c, kernels::crc32c_by_table}) {
    CHECK_EQ(sum(zeros.data(), 32), 0x8a9136aa);
    CHECK_EQ(sum(ones.data(), 32), 0x62a8ab43);
    CHECK_EQ(sum(kDigits.data(), kDigits.size()), 0xe3069283);
    CHECK_EQ(sum(nullptr, 0), 0);
  }
}

TEST(every_length_and_alignment) {
  const std::vector<unsigned char> data = noise(20'000);
  for (size_t from = 0; from < 9; ++from) {
    for (size_t bytes = 0; bytes < 100; ++bytes) {
      const uint32_t sum = by_bits(data.data() + from, bytes);
      CHECK_EQ(kernels::crc32c(data.data() + from, bytes), sum);
      CHECK_EQ(kernels::crc32c_by_table(data.data() + from, bytes), sum);
    }
    for (size_t bytes : {3071, 3072, 3073, 3080, 6144, 6151, 9217, 19'000}) {
      const uint32_t sum = by_bits(data.data() + from, bytes);
      CHECK_EQ(kernels::crc32c(data.data() + from, bytes), sum);
      CHECK_EQ(kernels::crc32c_by_table(data.data() + from, bytes), sum);
    }
  }
}

TEST(every_flipped_bit_changes_the_sum) {
  std::vector<unsigned char> data = noise(4000);
  const uint32_t sum = kernels::crc32c(data.data(), data.size());
  for (size_t bit = 0; bit < 8 * data.size(); ++bit) {
    const auto mask = static_cast<unsigned char>(1 << bit % 8);
    data[bit / 8] ^= mask;
    CHECK(kernels::crc32c(data.data(), data.size()) != sum);
    data[bit / 8] ^= mask;
  }
  CHECK_EQ(kernels::crc32c(data.data(), data.size()), sum);
}
