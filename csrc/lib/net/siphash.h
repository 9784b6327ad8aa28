// SPDX-License-Identifier: Apache-2.0
// SipHash-2-4 with 128 bits (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012). It is the MAC of
// handshakes (tcp_socket.h) and of messages between hosts. Nobody can compute a hash without the key.
#pragma once

#include <array>
#include <cstddef>
#include <span>

namespace farandole {

using Key128 = std::array<std::byte, 16>;
using Mac128 = std::array<std::byte, 16>;

Mac128 siphash128(const Key128& key, std::span<const std::byte> message);

}  // namespace farandole
