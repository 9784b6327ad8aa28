// SPDX-License-Identifier: Apache-2.0
// The leader of a host that has no memory left.
#include "control/hosts/host_controller.h"

#include <sys/socket.h>

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "check.h"

using namespace farandole;
using namespace farandole::check;

namespace {

Post post(Op op, Rank peer) {
  Post made;
  made.request.signature.op = op;
  made.request.signature.shape = {3};
  made.request.signature.root = 0;  // the sender
  made.request.peer = peer;
  made.contribution.has_input = op == Op::kSend;
  return made;
}

void report(MemberChannel& channel, const Report& report) {
  ByteString bytes;
  encode(report, bytes);
  channel.report(bytes);
}

Ready ready(const std::string& name) {
  Ready made;
  made.request.name = name;
  made.request.signature.shape = {1000};
  made.contribution.has_input = true;
  return made;
}

}  // namespace

// The coordinator hears of it: it decides nothing more, and tells nobody of calls that wait.
TEST(a_pair_without_memory_ends_the_job) {
  const Segment memory = Segment::create("control", ShmLayout::bytes_needed(2), true);
  const ShmLayout layout(memory.data(), 2);
  const Topology topology = Topology::of(0, {0, 0});
  SocketLinks links;
  Coordinator::Settings settings;
  settings.size = 2;
  const auto no_memory = [](SetId, const std::vector<Rank>&) -> SegmentSize {
    throw Error(ErrorCode::kLibrary, "no memory for the pair");
  };
  RootController root(settings, {LeaderChannel(layout, topology.local),
                                 nullptr,
                                 {},
                                 links,
                                 topology,
                                 {"a", "a"},
                                 no_memory,
                                 {0, 0}});
  MemberChannel zero(layout, 0), one(layout, 1);
  report(zero, ready("waits"));
  CHECK(root.step());
  CHECK(!root.next_tick().is_never());
  report(zero, post(Op::kSend, 1));
  report(one, post(Op::kReceive, 0));
  report(one, Leave{true, "an error"});  // its Abort is in the same batch
  CHECK(root.step());
  const auto last = one.next_entry();
  CHECK(last.has_value());
  CHECK_EQ(std::get<Abort>(decode_entry(*last)).failure.text, "no memory for the pair");
  CHECK(!one.next_entry());
  CHECK(root.next_tick().is_never());
}

// The leader of ranks 2 and 3, and the hosts above it as a test writes them.
struct Relay {
  struct Pair {
    Fd below, above;
    Pair() {
      int ends[2];
      CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
      below = Fd(ends[0]);
      above = Fd(ends[1]);
    }
  };
  static std::vector<TcpPeer> above_only(Fd fd) {
    std::vector<TcpPeer> peers;
    peers.push_back({0, std::move(fd)});
    return peers;
  }
  explicit Relay(HostController::StagingSize staging_size = {})
      : hosts(above_only(std::move(pair.below)), std::chrono::seconds(5), poller),
        relay({LeaderChannel(layout, topology.local),
               &hosts,
               HostTree::of(2, topology.node),
               links,
               topology,
               {"a", "a", "b", "b"},
               std::move(staging_size),
               {0, 0, 0, 0}}),
        leader(layout, 0) {}

  bool step() {
    poller.collect();
    return relay.step();
  }
  Failure end_of_job() {
    const auto entry = leader.next_entry();
    CHECK(entry.has_value());
    return std::get<Abort>(decode_entry(*entry)).failure;
  }

  const Segment memory = Segment::create("control", ShmLayout::bytes_needed(2), true);
  const ShmLayout layout{memory.data(), 2};
  const Topology topology = Topology::of(2, {0, 0, 2, 2});
  SocketLinks links;
  Poller poller;
  Pair pair;
  TcpHostChannel hosts;
  HostRelay relay;
  MemberChannel leader;
};

// Rank 0 ends the job for that death, and the network may lose its message.
TEST(a_leader_that_loses_the_hosts_above_tells_of_the_death_that_it_has_seen) {
  Relay host;
  host.relay.lose(3, {ErrorCode::kPeer, "rank 3 died"});
  CHECK(host.step());
  host.pair.above.reset();
  CHECK(host.step());
  CHECK_EQ(host.end_of_job().text, "rank 3 died");
}

// Later entries of the same message name the set.
TEST(a_leader_without_memory_for_a_set_ends_the_job_with_that_error) {
  Relay host([](SetId, const std::vector<Rank>&) -> SegmentSize {
    throw Error(ErrorCode::kLibrary, "no memory for the set");
  });
  ByteString message;
  for (const Entry& entry : {Entry(OpenSet{5, {1, 2, 3}, {}}), Entry(Stop{})}) {
    ByteString encoded;
    encode(entry, encoded);
    Encoder(message).put_bytes(encoded);
  }
  const ByteString frame = FrameWriter(TcpSession().receives).frame(message);
  CHECK_EQ(::send(host.pair.above.get(), frame.data(), frame.size(), MSG_NOSIGNAL), frame.size());
  CHECK(host.step());
  const Failure end = host.end_of_job();
  CHECK_EQ(end.code, ErrorCode::kLibrary);
  CHECK_EQ(end.text, "rank 2 on b: no memory for the set");
  CHECK(!host.leader.next_entry());
}
