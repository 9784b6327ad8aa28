// SPDX-License-Identifier: Apache-2.0
// What a rank opens before it meets the others.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "base/config.h"
#include "control/bootstrap/meeting.h"
#include "lib/ipc/arena.h"
#include "watch/witness.h"

namespace farandole {

struct Door {
  Config config;
  JobKey key;
  UnixListener listener;
  TcpListener hosts;
  StackSource stacks;
  std::shared_ptr<Arena> arena;  // what this rank shares; arrays in it may outlive the job
  std::unique_ptr<UnixSocket> to_leader;
  explicit Door(Config its_config, StackSource its_stacks = {},
                std::shared_ptr<Arena> its_arena = std::make_shared<Arena>());
  // The rank whose memory this one will share: the lowest that lets it in; itself, if none does.
  // node: as MPI has it.
  Rank knock(Rank own, const std::vector<Rank>& node, std::span<const Card> cards);
  ByteString card() const { return own_card(config, listener, hosts.address(), key).encode(); }
};

}  // namespace farandole
