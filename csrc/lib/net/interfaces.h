// SPDX-License-Identifier: Apache-2.0
// The addresses at which other hosts reach this one, on all network interfaces or on those that the user wants.
#pragma once

#include <string>
#include <vector>

namespace farandole {

struct Interface {
  std::string name, address;  // eth0, 10.0.0.1
  bool loopback = false;
};

// All that are up, once per address, without those that are valid on one link only.
std::vector<Interface> interfaces();

// Addresses of the interfaces in `wanted`, loopback last (for ranks of the same network only, see way_to in
// peer_info.h). `wanted`: entries separated by commas, each the start of a name ("eth"), a whole name ("=eth0"), an
// address or a network ("10.1.0.0/16"); after "^": all interfaces except these; empty: all. Throws kInvalidArgument,
// with all addresses, for an invalid entry, or if no interface is left.
std::vector<std::string> addresses_of(const std::vector<Interface>& all, const std::string& wanted);

}  // namespace farandole
