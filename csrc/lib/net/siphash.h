// SPDX-License-Identifier: Apache-2.0
// A keyed hash of short messages that nobody without the key can make: SipHash-2-4 with 128 bits
// (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012).
#pragma once

#include <array>
#include <cstddef>
#include <span>

namespace farandole {

using Key128 = std::array<std::byte, 16>;
using Mac128 = std::array<std::byte, 16>;

Mac128 siphash128(const Key128& key, std::span<const std::byte> message);
// Takes the same time wherever they differ.
bool equal_macs(std::span<const std::byte> a, std::span<const std::byte> b);

}  // namespace farandole
