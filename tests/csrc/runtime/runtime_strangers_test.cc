// SPDX-License-Identifier: Apache-2.0
// Jobs on several hosts with somebody between them, who relays what their leaders say and alters it.
#include <poll.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "lib/net/trap.h"
#include "runtime/runtime_ranks.h"

namespace farandole::check {
namespace {

const std::vector<Rank> kNodes = {0, 0, 2, 2};

// Relays the connection of rank 2 to rank 0. Once told to, flips a bit of what one of them sends.
class Middle {
 public:
  explicit Middle(bool of_leaf) : of_leaf_(of_leaf) {}
  ~Middle() {
    over_ = true;
    if (thread_.joinable()) thread_.join();
  }
  TcpAddress address() const { return trap_.address(); }
  void begin(const TcpAddress& root) {
    thread_ = std::thread([this, root] { relay(root); });
  }
  void alter() { altering_ = true; }

 private:
  void relay(const TcpAddress& root) {
    const Fd leaf = trap_.catch_one();
    const Fd other = call(root);
    pollfd events[2] = {{leaf.get(), POLLIN, 0}, {other.get(), POLLIN, 0}};
    while (!over_) {
      poll(events, 2, 10);
      for (int i = 0; i < 2; ++i) {
        std::byte chunk[4096];
        if (events[i].revents == 0) continue;
        const ssize_t n = recv(events[i].fd, chunk, sizeof chunk, MSG_DONTWAIT);
        if (n <= 0) return;
        if ((i == 0) == of_leaf_ && altering_.exchange(false)) chunk[n - 1] ^= std::byte{4};
        CHECK_EQ(::send(events[1 - i].fd, chunk, static_cast<size_t>(n), MSG_NOSIGNAL), n);
      }
    }
  }

  const bool of_leaf_;
  const Trap trap_;
  std::atomic<bool> altering_{false}, over_{false};
  std::thread thread_;
};

// One that needs no wire: its inputs travel in the reports.
Failure small_call(TestRank& self) {
  Floats data = values_of(self.rank, 30);
  if (Failure failure = self.outcome(allreduce(data, "small"))) return failure;
  CHECK(data == sum_over(self.size, data.size()));
  return {};
}

}  // namespace

TEST(an_altered_control_message_is_an_error_on_every_rank_that_names_its_host) {
  for (const bool of_leaf : {true, false}) {
    LocalBootstrap bootstrap(4);
    Middle middle(of_leaf);
    in_threads(4, [&](int rank) {
      TestRank self(bootstrap, rank, test_config(), kNodes);
      LocalEndpoint endpoint(test_config());
      auto peer_infos = bootstrap.exchange(rank, 0, endpoint.peer_info());
      const TcpAddress root{{"127.0.0.1"}, peer_infos[0].tcp.port};
      if (rank == 0) middle.begin(root);
      peer_infos[0].tcp = middle.address();
      self.enter(std::move(endpoint), peer_infos);
      CHECK(!small_call(self));  // relayed
      bootstrap.barrier();
      if (rank == 0) middle.alter();
      bootstrap.barrier();
      Failure failure;  // a call that its rank has ended already is no longer altered
      while (!failure) failure = small_call(self);
      CHECK_EQ(failure.code, ErrorCode::kPeer);
      const bool named = contains(failure.text, of_leaf ? "rank 2 on " : "rank 0 on ");
      if (!named || !contains(failure.text, "changed, repeated or dropped")) {
        fail(failure.text);
      }
      bootstrap.barrier();
      self.leave_failed("altered");
    });
  }
}

}  // namespace farandole::check
