// SPDX-License-Identifier: Apache-2.0
// Finds the addresses at which other hosts reach this one, on the network interfaces that the user wants.
#pragma once

#include <string>
#include <vector>

namespace farandole {

struct Interface {
  std::string name, address;  // eth0, 10.0.0.1
  bool loopback = false;
};

// Interfaces that are up, one element per address, without link-local addresses.
std::vector<Interface> interfaces();

// Addresses of the interfaces in `wanted`, then loopback (for ranks in the same network namespace, see way_to in
// peer_info.h). `wanted`: entries separated by commas, each the start of a name ("eth"), a whole name ("=eth0"), an
// address or a network ("10.1.0.0/16"). After "^": all interfaces except these. Empty: all. Throws
// Error(kInvalidArgument) for an invalid entry, or if no interface in `all` is wanted; the error lists `all`.
std::vector<std::string> addresses_of(const std::vector<Interface>& all, const std::string& wanted);

}  // namespace farandole
