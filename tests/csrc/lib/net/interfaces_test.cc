// SPDX-License-Identifier: Apache-2.0
#include "lib/net/interfaces.h"

#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "lib/os/fd.h"

using namespace farandole;
using namespace farandole::check;

namespace {

const std::vector<Interface> kHost = {{"lo", "127.0.0.1", true},
                                      {"eth0", "10.1.2.3", false},
                                      {"eth10", "10.2.0.9", false},
                                      {"ib0", "192.168.7.1", false},
                                      {"eth0", "2001:db8::5", false}};

std::string taken(const std::string& wanted) {
  std::string text;
  for (const std::string& address : addresses_of(kHost, wanted)) text += address + " ";
  return text;
}

}  // namespace

TEST(interfaces_are_named_by_prefix_name_address_or_network) {
  CHECK_EQ(taken(""), "10.1.2.3 10.2.0.9 192.168.7.1 2001:db8::5 127.0.0.1 ");
  CHECK_EQ(taken("eth"), "10.1.2.3 10.2.0.9 2001:db8::5 127.0.0.1 ");
  CHECK_EQ(taken("=eth0"), "10.1.2.3 2001:db8::5 127.0.0.1 ");
  CHECK_EQ(taken("ib,=eth10"), "10.2.0.9 192.168.7.1 127.0.0.1 ");
  CHECK_EQ(taken(",ib,"), "192.168.7.1 127.0.0.1 ");
  CHECK_EQ(taken("10.0.0.0/8"), "10.1.2.3 10.2.0.9 127.0.0.1 ");
  CHECK_EQ(taken("10.1.0.0/15"), "10.1.2.3 127.0.0.1 ");
  CHECK_EQ(taken("10.2.0.9"), "10.2.0.9 127.0.0.1 ");
  CHECK_EQ(taken("2001:db8::/32"), "2001:db8::5 127.0.0.1 ");
  CHECK_EQ(taken("^eth,lo"), "192.168.7.1 127.0.0.1 ");
  CHECK_EQ(taken("lo"), "127.0.0.1 ");
}

TEST(what_names_no_interface_is_an_error_that_lists_them) {
  const std::string text = CHECK_THROWS(addresses_of(kHost, "wlan"), ErrorCode::kInvalidArgument);
  CHECK(text.find("it has eth0 10.1.2.3, eth10") != std::string::npos);
  CHECK_THROWS(addresses_of(kHost, "^lo,eth,ib"), ErrorCode::kInvalidArgument);
  for (const char* wrong : {"10.0.0.0/33", "10.0.0/8", "eth0/8", "10.0.0.0/x", "10.0.0.0/8x"}) {
    CHECK(contains(CHECK_THROWS(addresses_of(kHost, wrong), ErrorCode::kInvalidArgument),
                   "is not a network"));
  }
}

TEST(the_interfaces_of_this_host) {
  const std::vector<Interface> all = interfaces();
  CHECK(std::ranges::any_of(all, [](const Interface& one) { return one.loopback; }));
}

TEST(only_interfaces_that_are_up_count) {
  if (geteuid() != 0) skip("needs root, for a network");
  run_in_fork([] {
    if (unshare(CLONE_NEWNET) != 0 && errno == EPERM) return;  // where containers forbid it
    CHECK(interfaces().empty());
    const Fd fd(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    ifreq up{};
    std::strcpy(up.ifr_name, "lo");
    up.ifr_flags = IFF_UP;
    CHECK_EQ(ioctl(fd.get(), SIOCSIFFLAGS, &up), 0);
    const std::vector<Interface> all = interfaces();
    CHECK_EQ(all.at(0).address, "127.0.0.1");
    for (const Interface& one : all) CHECK(one.loopback && one.name == "lo");
  });
}
