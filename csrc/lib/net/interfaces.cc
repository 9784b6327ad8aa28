// SPDX-License-Identifier: Apache-2.0
#include "lib/net/interfaces.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <memory>
#include <optional>

#include "base/error.h"

namespace farandole {
namespace {

using Ip = std::vector<uint8_t>;  // 4 or 16 bytes

std::optional<Ip> parse_ip(const std::string& text) {
  std::array<uint8_t, 16> bytes;
  if (inet_pton(AF_INET, text.c_str(), bytes.data()) == 1)
    return Ip(bytes.begin(), bytes.begin() + 4);
  if (inet_pton(AF_INET6, text.c_str(), bytes.data()) == 1) return Ip(bytes.begin(), bytes.end());
  return std::nullopt;
}

struct Network {
  Ip ip;
  size_t bits;
  bool holds(const Ip& other) const {
    if (other.size() != ip.size()) return false;
    for (size_t bit = 0; bit < bits; ++bit) {
      if (((ip[bit / 8] ^ other[bit / 8]) >> (7 - bit % 8) & 1) != 0) return false;
    }
    return true;
  }
};

// Returns nullopt if the entry is the name of an interface.
std::optional<Network> parse_network(const std::string& entry) {
  const size_t slash = entry.find('/');
  const std::optional<Ip> ip = parse_ip(entry.substr(0, slash));
  if (!ip && slash == std::string::npos) return std::nullopt;
  size_t bits = ip ? 8 * ip->size() : 0;
  if (slash != std::string::npos) {
    const size_t most = bits;
    const char* end = entry.data() + entry.size();
    const auto [rest, error] = std::from_chars(entry.data() + slash + 1, end, bits);
    if (!ip || error != std::errc() || rest != end || bits > most) {
      throw Error(ErrorCode::kInvalidArgument, "FARANDOLE_INTERFACE: '" + entry +
                                                   "' is not a network; write it like 10.1.0.0/16");
    }
  }
  return Network{*ip, bits};
}

bool matches(const Interface& one, const std::string& entry) {
  if (const std::optional<Network> network = parse_network(entry)) {
    const std::optional<Ip> ip = parse_ip(one.address);
    return ip && network->holds(*ip);
  }
  return entry.starts_with('=') ? one.name == entry.substr(1) : one.name.starts_with(entry);
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> entries;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    if (end > begin) entries.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return entries;
}

std::string text_of(const std::vector<Interface>& all) {
  std::string text;
  for (const Interface& one : all) {
    if (!one.loopback) text += (text.empty() ? "" : ", ") + one.name + " " + one.address;
  }
  return text.empty() ? "none" : text;
}

}  // namespace

std::vector<Interface> interfaces() {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return {{"lo", "127.0.0.1", true}};
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(first, &freeifaddrs);
  std::vector<Interface> found;
  for (const ifaddrs* i = first; i != nullptr; i = i->ifa_next) {
    if (i->ifa_addr == nullptr || (i->ifa_flags & IFF_UP) == 0) continue;
    const int family = i->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    const socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    char text[NI_MAXHOST];
    if (getnameinfo(i->ifa_addr, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) {
      continue;
    }
    const bool link_local = std::strncmp(text, "fe80:", 5) == 0;  // not valid on another host
    if (!link_local) found.push_back({i->ifa_name, text, (i->ifa_flags & IFF_LOOPBACK) != 0});
  }
  return found;
}

std::vector<std::string> addresses_of(const std::vector<Interface>& all,
                                      const std::string& wanted) {
  const bool but = wanted.starts_with('^');
  const std::vector<std::string> entries = split(wanted.substr(but ? 1 : 0));
  std::vector<std::string> addresses, loopback;
  bool found = false;  // an interface (perhaps the loopback) is selected
  for (const Interface& one : all) {
    const bool named =
        std::ranges::any_of(entries, [&](const std::string& entry) { return matches(one, entry); });
    const bool takes = entries.empty() || named != but;
    found |= takes;
    if (one.loopback) loopback.push_back(one.address);
    if (!one.loopback && takes) addresses.push_back(one.address);
  }
  if (!entries.empty() && !found) {
    throw Error(ErrorCode::kInvalidArgument,
                "FARANDOLE_INTERFACE=" + wanted +
                    " selects no network interface of this host; it has " + text_of(all));
  }
  addresses.insert(addresses.end(), loopback.begin(), loopback.end());
  return addresses;
}

}  // namespace farandole
