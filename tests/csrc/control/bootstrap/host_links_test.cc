// SPDX-License-Identifier: Apache-2.0
// Proofs by which a rank comes to the leader of its host: each is worth something at one socket of one world only.
#include "control/bootstrap/host_links.h"

#include "check.h"
#include "control/bootstrap/local_bootstrap.h"

namespace farandole::check {
namespace {

Deadline soon() { return Deadline::in(std::chrono::milliseconds{20}); }

}  // namespace

// What a rank proves to the leader of its host is worth nothing at any other socket.
TEST(a_proof_for_another_socket_is_refused) {
  const JobKey world = random_key();
  UnixListener asked, meant;
  UnixSocket relayed = UnixSocket::connect(asked.name(), proof_at(meant.name(), world), patience());
  UnixSocket of_another_world =
      UnixSocket::connect(asked.name(), proof_at(asked.name(), random_key()), patience());
  CHECK_THROWS(asked.accept(proof_at(asked.name(), world), soon()), ErrorCode::kStall);
  CHECK_THROWS(relayed.receive(patience()), ErrorCode::kPeer);
  CHECK_THROWS(of_another_world.receive(patience()), ErrorCode::kPeer);
  UnixSocket right = UnixSocket::connect(asked.name(), proof_at(asked.name(), world), patience());
  CHECK(asked.accept(proof_at(asked.name(), world), patience()).fd() >= 0);
}

}  // namespace farandole::check
