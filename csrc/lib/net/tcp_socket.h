// SPDX-License-Identifier: Apache-2.0
// TCP between the leaders of hosts: a listener, and connections whose two ends have proved to each other
// that they know the job's key and are the ranks that they say.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "lib/net/siphash.h"
#include "lib/os/fd.h"

namespace farandole {

// Where a leader can be reached, as its card says.
struct TcpAddress {
  std::vector<std::string> hosts;  // numeric, the likeliest first
  uint16_t port = 0;               // 0: no sockets there
};

// A connection to a rank that has proved itself. Non-blocking.
struct TcpPeer {
  int32_t rank = 0;
  Fd fd;
};

class TcpListener {
 public:
  // On all interfaces; a machine without usable sockets gives an address with port 0.
  TcpListener();
  const TcpAddress& address() const { return address_; }

  // All of these ranks, each once. Others are dropped: at once if they prove to be wrong, after
  // kPatience if they are silent; they hold up nobody. Throws Error(kPeer) naming who has not come by
  // the deadline.
  std::vector<TcpPeer> accept(int32_t own, const std::vector<int32_t>& ranks, const Key128& key,
                              Deadline deadline);
  int fd() const { return fd_.get(); }

  static constexpr std::chrono::seconds kPatience{5};
  static constexpr size_t kMaxStrangers = 128;  // the oldest goes when one more comes

 private:
  struct Stranger {
    Fd fd;
    Deadline due;
    int32_t rank = -1;                // as it says, once it has said hello
    std::vector<std::byte> received;  // of its next message
    std::vector<std::byte> sent;      // the challenge that it must answer
  };
  void admit();
  bool hear(Stranger& stranger, int32_t own, const Key128& key, bool& proved);
  void wait(Deadline deadline) const;

  TcpAddress address_;
  Fd fd_;
  std::vector<Stranger> strangers_;
};

// To a rank that listens there. Throws Error(kPeer) that says what was tried.
TcpPeer tcp_connect(int32_t own, int32_t rank, const TcpAddress& address, const Key128& key,
                    Deadline deadline);

}  // namespace farandole
