// SPDX-License-Identifier: Apache-2.0
// Leaders linked by MPI, where TCP between their hosts is blocked. MPI has no wake-up and tells of no
// death, so a thread looks again after ever longer sleeps, and who has nothing to say says so.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "control/channel/host_channel.h"
#include "lib/mpi/mpi.h"

namespace farandole {

class MpiChannel final : public HostChannel {
 public:
  // comm: must outlive this; its largest tag is ours. timeout: of a peer that says nothing at all.
  MpiChannel(MpiComm& comm, const std::vector<Rank>& peers, std::chrono::milliseconds timeout,
             std::function<void()> notify);
  ~MpiChannel() override;

  void send(Rank peer, ByteView message) override;

 private:
  static constexpr size_t kHeadBytes = 1024;  // first part of each message; its size comes first
  static constexpr size_t kRoom = kHeadBytes - sizeof(uint32_t);
  static constexpr uint32_t kBeat = 0;  // sizes that say something else
  static constexpr uint32_t kEnd = ~0U;
  static constexpr uint32_t kMaxMessage = 256U << 20;  // beyond it, the peer is mad

  // Both parts are under way until their requests are done.
  struct Outgoing {
    ByteString head, rest;
    MpiRequest head_request, rest_request;
  };
  struct Link {
    Rank rank = 0;
    bool open = true;    // for reading
    bool ended = false;  // has said its last
    ByteString head = ByteString(kHeadBytes);
    MpiRequest head_request;
    ByteString message;  // that head has begun
    MpiRequest rest_request;
    std::deque<Outgoing> out;
    int64_t heard_ns = 0, spoke_ns = 0;
  };

  void run() override;
  void wake() override;
  bool say_last() override;
  bool step(Link& link);
  bool read(Link& link);
  bool take_head(Link& link);
  bool flush(Link& link);
  void keep_alive(Link& link);
  void put(Link& link, uint32_t size, ByteView message);
  void lose(Link& link, std::string trouble);
  void abandon(Link& link) noexcept;

  MpiComm& comm_;
  const int tag_;
  const std::chrono::milliseconds timeout_;
  std::map<Rank, Link> links_;       // under the mutex
  std::atomic<uint32_t> spoken_{0};  // counts what wakes the thread
};

}  // namespace farandole
