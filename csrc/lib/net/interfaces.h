// SPDX-License-Identifier: Apache-2.0
// The addresses at which other hosts reach this one, of all network interfaces or of those that the user wants.
#pragma once

#include <string>
#include <vector>

namespace farandole {

struct Interface {
  std::string name, address;  // eth0, 10.0.0.1
  bool loopback = false;
};

// All that are up, once per address; those that are valid on this link only are left out.
std::vector<Interface> interfaces();

// Addresses of the interfaces that `wanted` names, loopback last (for ranks of the same network only, see way_to
// in peer_info.h). `wanted`: entries with commas between them, each the beginning of a name ("eth"), a whole name
// ("=eth0"), an address or a network ("10.1.0.0/16"); after "^": all interfaces but these; empty: all.
// Throws kInvalidArgument, with what there is, for an entry that can't be read and where no interface is left.
std::vector<std::string> addresses_of(const std::vector<Interface>& all, const std::string& wanted);

}  // namespace farandole
