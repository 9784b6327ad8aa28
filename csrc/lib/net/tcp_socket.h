// SPDX-License-Identifier: Apache-2.0
// TCP between the ranks of different hosts: a listener, and connections whose two ends have proved to each
// other that they know the job's key and are the ranks that they say.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "lib/ipc/doorway.h"
#include "lib/net/siphash.h"
#include "lib/os/fd.h"

namespace farandole {

// Where a rank can be reached, as its card says.
struct TcpAddress {
  std::vector<std::string> hosts;  // numeric, the likeliest first
  uint16_t port = 0;               // 0: no sockets there
};

// What a connection is for, as its caller says.
using TcpLine = uint64_t;
constexpr TcpLine kControlLine = 0;

// A connection to a rank that has proved itself. Non-blocking.
struct TcpPeer {
  int32_t rank = 0;
  Fd fd;
  TcpLine line = kControlLine;
};

class TcpListener {
 public:
  // On all interfaces; a machine without usable sockets gives an address with port 0.
  TcpListener();
  const TcpAddress& address() const { return address_; }

  // All of these ranks, each once, for control. Strangers are dropped: at once if they prove to be wrong, after
  // kPatience if they are silent. Throws Error(kPeer) naming who has not come by the deadline.
  std::vector<TcpPeer> accept(int32_t own, const std::vector<int32_t>& ranks, const Key128& key,
                              Deadline deadline);
  // The connection that this rank has made for this line; invalid: none yet. Never waits.
  Fd take(int32_t own, int32_t rank, TcpLine line, const Key128& key);

  static constexpr size_t kMaxStrangers = 128;

 private:
  struct Stranger {
    Fd fd;
    int32_t rank = -1;                     // as it says, once it has said hello
    TcpLine line = 0;                      // as it says
    std::vector<std::byte> received = {};  // of its next message
    std::vector<std::byte> wanted = {};    // the proof that it must give
  };
  void look(int32_t own, const Key128& key);
  Fd take_proved(int32_t rank, TcpLine line);
  bool undecided(Stranger& stranger, int32_t own, const Key128& key);
  bool answer(Stranger& stranger, int32_t own, const Key128& key);

  TcpAddress address_;
  Doorway<Stranger> doorway_;
  std::vector<TcpPeer> proved_;  // and not taken yet
};

// Calls a rank at one of its addresses after the other, round after round, until it has proved itself. Never
// waits but in wait().
class TcpCaller {
 public:
  TcpCaller(int32_t own, int32_t rank, TcpLine line, TcpAddress address, const Key128& key);

  // True: fd() is the connection.
  bool step();
  Fd& fd() { return fd_; }
  void wait(Deadline deadline) const;
  // Addresses have refused for so long, and none has been silent, as of a rank that is busy.
  bool refused_for(std::chrono::nanoseconds time) const;
  // What was tried in vain.
  std::string trouble() const;

 private:
  enum class Stage { kPause, kConnecting, kListening, kProved };
  void dial();
  void see_whether_connected();
  void hear();
  void hang_up(const std::string& why, bool refused);

  const int32_t own_;
  const int32_t rank_;
  const TcpLine line_;
  const TcpAddress address_;
  const Key128 key_;
  Stage stage_ = Stage::kPause;
  Deadline due_ = Deadline::at(0);        // end of the stage
  Deadline refused_ = Deadline::never();  // since when
  size_t next_ = 0;                       // address
  Key128 nonce_{};
  std::vector<std::byte> received_;
  std::string tried_, tried_before_;  // in this round, in the one before
  Fd fd_;
};

// To a rank that listens there, for control. Throws Error(kPeer) that says what was tried.
TcpPeer tcp_connect(int32_t own, int32_t rank, const TcpAddress& address, const Key128& key,
                    Deadline deadline);

}  // namespace farandole
