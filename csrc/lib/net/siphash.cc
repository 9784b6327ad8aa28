// SPDX-License-Identifier: Apache-2.0
#include "lib/net/siphash.h"

#include <bit>
#include <cstdint>
#include <cstring>

namespace farandole {
namespace {

struct State {
  uint64_t v0, v1, v2, v3;

  void rounds(int n) {
    for (; n > 0; --n) {
      v0 += v1, v1 = std::rotl(v1, 13) ^ v0, v0 = std::rotl(v0, 32);
      v2 += v3, v3 = std::rotl(v3, 16) ^ v2;
      v0 += v3, v3 = std::rotl(v3, 21) ^ v0;
      v2 += v1, v1 = std::rotl(v1, 17) ^ v2, v2 = std::rotl(v2, 32);
    }
  }
  void absorb(uint64_t word) {
    v3 ^= word;
    rounds(2);
    v0 ^= word;
  }
};

uint64_t word_at(const std::byte* at, size_t bytes) {
  uint64_t word = 0;
  std::memcpy(&word, at, bytes);
  return word;
}

}  // namespace

Mac128 siphash128(const Key128& key, std::span<const std::byte> message) {
  const uint64_t k0 = word_at(key.data(), 8), k1 = word_at(key.data() + 8, 8);
  State s{k0 ^ 0x736f6d6570736575, k1 ^ 0x646f72616e646f6d ^ 0xee, k0 ^ 0x6c7967656e657261,
          k1 ^ 0x7465646279746573};
  size_t at = 0;
  for (; at + 8 <= message.size(); at += 8) s.absorb(word_at(message.data() + at, 8));
  const uint64_t rest = at < message.size() ? word_at(message.data() + at, message.size() - at) : 0;
  s.absorb(rest | (static_cast<uint64_t>(message.size()) << 56));
  uint64_t out[2];
  s.v2 ^= 0xee;
  s.rounds(4);
  out[0] = s.v0 ^ s.v1 ^ s.v2 ^ s.v3;
  s.v1 ^= 0xdd;
  s.rounds(4);
  out[1] = s.v0 ^ s.v1 ^ s.v2 ^ s.v3;
  Mac128 mac;
  std::memcpy(mac.data(), out, sizeof out);
  return mac;
}

}  // namespace farandole
