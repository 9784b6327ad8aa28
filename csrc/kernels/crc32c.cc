// SPDX-License-Identifier: Apache-2.0
#include "kernels/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#define FARANDOLE_HAS_CRC [[gnu::target("sse4.2")]]
#elif defined(__aarch64__)
#include <sys/auxv.h>
#define FARANDOLE_HAS_CRC [[gnu::target("+crc")]]
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

namespace farandole::kernels {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // bits reversed, as in all of this file
using Table = std::array<uint32_t, 256>;

// What a byte becomes in the register.
constexpr Table make_row() {
  Table row{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (value & 1 ? kPolynomial : 0);
    row[byte] = value;
  }
  return row;
}
constexpr Table kRow = make_row();

uint32_t by_table(uint32_t sum, const unsigned char* at, size_t bytes) {
  for (; bytes > 0; ++at, --bytes) sum = (sum >> 8) ^ kRow[(sum ^ *at) & 0xff];
  return sum;
}

#if defined(FARANDOLE_HAS_CRC)

// The instruction takes several cycles, but the CPU starts one in each: so three sums at once, of three
// neighbouring lanes of this length, are put together at the end.
constexpr size_t kLane = 1024;

uint64_t word_at(const unsigned char* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

// Row n: what byte n of the register becomes once kLane bytes of zero have followed.
constexpr std::array<Table, 4> make_shift() {
  std::array<uint32_t, 32> of_bit{};
  for (size_t bit = 0; bit < 32; ++bit) {
    uint32_t value = uint32_t{1} << bit;
    for (size_t i = 0; i < kLane; ++i) value = (value >> 8) ^ kRow[value & 0xff];
    of_bit[bit] = value;
  }
  std::array<Table, 4> shift{};
  for (size_t row = 0; row < 4; ++row) {
    for (size_t byte = 0; byte < 256; ++byte) {
      for (size_t bit = 0; bit < 8; ++bit) {
        if (byte >> bit & 1) shift[row][byte] ^= of_bit[8 * row + bit];
      }
    }
  }
  return shift;
}
constexpr std::array<Table, 4> kShift = make_shift();

uint32_t shifted(uint32_t sum) {
  return kShift[0][sum & 0xff] ^ kShift[1][sum >> 8 & 0xff] ^ kShift[2][sum >> 16 & 0xff] ^
         kShift[3][sum >> 24];
}

#if defined(__x86_64__)
bool has_instruction() { return __builtin_cpu_supports("sse4.2") != 0; }
FARANDOLE_HAS_CRC uint32_t with_word(uint32_t sum, uint64_t word) {
  return static_cast<uint32_t>(__builtin_ia32_crc32di(sum, word));
}
FARANDOLE_HAS_CRC uint32_t with_byte(uint32_t sum, unsigned char byte) {
  return __builtin_ia32_crc32qi(sum, byte);
}
#else
bool has_instruction() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
FARANDOLE_HAS_CRC uint32_t with_word(uint32_t sum, uint64_t word) {
  return __builtin_aarch64_crc32cx(sum, word);
}
FARANDOLE_HAS_CRC uint32_t with_byte(uint32_t sum, unsigned char byte) {
  return __builtin_aarch64_crc32cb(sum, byte);
}
#endif

FARANDOLE_HAS_CRC uint32_t by_instruction(uint32_t sum, const unsigned char* at, size_t bytes) {
  for (; bytes >= 3 * kLane; at += 3 * kLane, bytes -= 3 * kLane) {
    uint32_t second = 0, third = 0;
    for (size_t i = 0; i < kLane; i += 8) {
      sum = with_word(sum, word_at(at + i));
      second = with_word(second, word_at(at + kLane + i));
      third = with_word(third, word_at(at + 2 * kLane + i));
    }
    sum = shifted(shifted(sum) ^ second) ^ third;
  }
  for (; bytes >= 8; at += 8, bytes -= 8) sum = with_word(sum, word_at(at));
  for (; bytes > 0; ++at, --bytes) sum = with_byte(sum, *at);
  return sum;
}

#else
bool has_instruction() { return false; }
constexpr auto by_instruction = by_table;
#endif

}  // namespace

uint32_t crc32c(const void* data, size_t bytes) {
  static const auto sum_of = has_instruction() ? by_instruction : by_table;
  return ~sum_of(~uint32_t{0}, static_cast<const unsigned char*>(data), bytes);
}

uint32_t crc32c_by_table(const void* data, size_t bytes) {
  return ~by_table(~uint32_t{0}, static_cast<const unsigned char*>(data), bytes);
}

}  // namespace farandole::kernels
