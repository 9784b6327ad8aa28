// SPDX-License-Identifier: Apache-2.0
// TCP between ranks of different hosts: a listener and a caller. A connection is used only after both ends have proved
// which rank they are and that they know the job's key.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "lib/net/guarded_listener.h"
#include "lib/net/siphash.h"
#include "lib/os/fd.h"

namespace farandole {

// The addresses of a rank, from its peer info.
struct TcpAddress {
  std::vector<std::string> hosts;  // numeric; the address that most likely works is first
  uint16_t port = 0;               // 0 if the rank has no usable sockets
};

// The purpose of a connection. The caller chooses it.
using TcpLine = uint64_t;
constexpr TcpLine kControlLine = 0;

// Keys that authenticate messages after the handshake. They are derived from the job's key and both nonces. Each
// connection therefore has its own keys, and a process that relays the handshake does not know them.
struct TcpSession {
  Key128 sends{};
  Key128 receives{};
};

// A non-blocking connection to a rank that has proved its identity.
struct TcpPeer {
  int32_t rank = 0;
  Fd fd;
  TcpLine line = kControlLine;
  TcpSession session = {};
};

class TcpListener {
 public:
  // Listens on all interfaces, but address() contains only the addresses that addresses_of() (interfaces.h) chooses. If
  // listening fails, the port in address() is 0.
  explicit TcpListener(const std::string& interface = "");
  const TcpAddress& address() const { return address_; }

  // Waits for a control connection from each of these ranks. Drops connections whose proof fails or that are silent for
  // kPatience. At the deadline, throws Error(kPeer) with a text that names the missing ranks.
  std::vector<TcpPeer> accept(int32_t own, const std::vector<int32_t>& ranks, const Key128& key,
                              Deadline deadline);
  // Returns the connection that `rank` made for this line, or an invalid Fd if there is none yet. Never blocks.
  Fd take(int32_t own, int32_t rank, TcpLine line, const Key128& key);

  // Adds room for honest callers, beyond kMaxStrangers.
  void expect(size_t callers) { guarded_.expect(callers); }
  void forget(size_t callers) { guarded_.forget(callers); }

  static constexpr size_t kMaxStrangers = 64;

 private:
  struct Unauthenticated {
    bool greeted() const { return rank >= 0; }

    Fd fd;
    int32_t rank = -1;                     // as claimed in the hello; -1 before the hello
    TcpLine line = 0;                      // as claimed in the hello
    std::vector<std::byte> received = {};  // the part of the next message that has arrived
    std::vector<std::byte> wanted = {};    // the proof that the caller must send
    TcpSession session = {};               // valid after the proof
  };
  void look(int32_t own, const Key128& key);
  TcpPeer take_proved(int32_t rank, TcpLine line);
  bool undecided(Unauthenticated& caller, int32_t own, const Key128& key);
  bool answer(Unauthenticated& caller, int32_t own, const Key128& key);

  TcpAddress address_;
  GuardedListener<Unauthenticated> guarded_;
  std::vector<TcpPeer> proved_;  // until take() or accept() returns them
};

// Connects to a rank: tries its addresses in turn, until a listener proves that it is that rank. Only wait() blocks.
class TcpCaller {
 public:
  TcpCaller(int32_t own, int32_t rank, TcpLine line, TcpAddress address, const Key128& key);

  // Continues as far as possible without blocking. Returns true once fd() is the proved connection.
  bool step();
  Fd& fd() { return fd_; }
  const TcpSession& session() const { return session_; }
  void wait(Deadline deadline) const;
  // True if all addresses have refused for this long. A silent address restarts the time, because the rank may be busy.
  bool refused_for(std::chrono::nanoseconds time) const;
  // Returns each address with its error, for messages.
  std::string trouble() const;

 private:
  // pause -> connecting -> listening (for the answer and the welcome) -> proved. A failure leads back to pause.
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
  Deadline refused_ = Deadline::never();  // first refusal since an address was last silent
  size_t next_ = 0;                       // index of the address to try next
  Key128 nonce_{};
  std::vector<std::byte> received_;
  TcpSession session_;
  std::string tried_, tried_before_;  // errors of this round and of the previous round
  Fd fd_;
};

// Opens a control connection to a rank. On failure, throws Error(kPeer) with each address and its error.
TcpPeer tcp_connect(int32_t own, int32_t rank, const TcpAddress& address, const Key128& key,
                    Deadline deadline);

}  // namespace farandole
