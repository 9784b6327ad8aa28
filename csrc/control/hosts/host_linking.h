// SPDX-License-Identifier: Apache-2.0
// How the leaders of hosts find each other at init: by TCP, or, where that is blocked, by MPI. All take
// the same way.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "control/bootstrap/meeting.h"
#include "control/channel/host_channel.h"
#include "lib/mpi/mpi.h"
#include "lib/net/tcp_socket.h"

namespace farandole {

struct HostLinking {
  Rank rank = 0;            // own
  Rank above = -1;          // leader to link with; -1: this is the root
  std::vector<Rank> below;  // leaders that link with this one
  std::span<const Card> cards;
  std::string way;         // FARANDOLE_CHANNEL: auto, tcp or mpi
  MpiComm* mpi = nullptr;  // null: TCP is the only way
  std::chrono::milliseconds peer_timeout;
  std::function<void()> notify;
};

// Collective over the leaders. Throws Error(kPeer) that says what was tried, kLibrary or
// kInvalidArgument if the way asked for does not exist.
std::unique_ptr<HostChannel> link_hosts(const HostLinking& own, TcpListener& listener,
                                        Deadline deadline);

}  // namespace farandole
