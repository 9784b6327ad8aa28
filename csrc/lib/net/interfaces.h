// SPDX-License-Identifier: Apache-2.0
// Finds the addresses at which other hosts can reach this host, on the network interfaces that the user has selected.
#pragma once

#include <string>
#include <vector>

namespace farandole {

struct Interface {
  std::string name, address;  // such as eth0 and 10.0.0.1
  bool loopback = false;
};

// Returns the interfaces that are up, with one element for each address except link-local addresses.
std::vector<Interface> interfaces();

// Returns the addresses of the interfaces that `wanted` selects, then the loopback address (for ranks in the same
// network namespace, see way_to in peer_info.h). `wanted` is a comma-separated list. Each entry is the start of a name
// ("eth"), a whole name ("=eth0"), an address or a network ("10.1.0.0/16"). If the list starts with "^", selects all
// interfaces except those listed. If the list is empty, selects all interfaces. Throws Error(kInvalidArgument) for an
// invalid entry, or if no interface in `all` is selected; the error then lists `all`.
std::vector<std::string> addresses_of(const std::vector<Interface>& all, const std::string& wanted);

}  // namespace farandole
