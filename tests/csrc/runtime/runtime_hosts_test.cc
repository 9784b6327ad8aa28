// SPDX-License-Identifier: Apache-2.0
// Ranks that believe they sit on several hosts: they share memory only where their node is the same, and
// their leaders meet by TCP.
#include <string>
#include <vector>

#include "lib/os/process.h"
#include "runtime/runtime_ranks.h"

namespace farandole::check {
namespace {

// Two hosts of two, one rank a host, unequal hosts, and ranks dealt out in turns.
const std::vector<Nodes> kLayouts = {{0, 0, 2, 2}, {0, 1, 2}, {0, 0, 0, 3}, {0, 1, 0, 1}};

void run_hosts(const Nodes& nodes, const Body& body, const Tune& tune = {}) {
  for (Kind kind : {Kind::kProcesses, Kind::kThreads}) {
    run_job(kind, static_cast<int>(nodes.size()), body, tune, nodes);
  }
}

void check_tiny(TestRank& self, const std::string& name = {}) {
  Floats data = values_of(self.rank, 50);
  self.run(allreduce(data, name));
  CHECK(data == sum_over(self.size, 50));
}

Ask barrier() {
  Ask ask;
  ask.op = FARANDOLE_BARRIER;
  return ask;
}

}  // namespace

TEST(hosts_agree_and_calls_of_all_sizes_work_between_them) {
  for (const Nodes& nodes : kLayouts) {
    run_hosts(nodes, [](TestRank& self) {
      for (int round = 0; round < 20; ++round) {
        check_tiny(self, "named");
        check_tiny(self);
        self.run(barrier());
      }
      Floats root = values_of(self.rank, 30);
      Ask ask = allreduce(root, "from the last");
      ask.op = FARANDOLE_BROADCAST;
      ask.root = self.size - 1;
      self.run(ask);
      CHECK(root == values_of(self.size - 1, 30));
      const SetId set = add_set(self, {0, self.size - 1});
      for (int round = 0; round < 4; ++round) {
        Floats data = values_of(self.rank, 50'000);
        Floats pair = values_of(self.rank, 30'000);
        std::vector<Handle> handles = {self.submit(allreduce(data, "large"))};
        if (self.rank == 0 || self.rank == self.size - 1) {
          Ask of_two = allreduce(pair, "of two");
          of_two.set = set;
          handles.push_back(self.submit(of_two));
        }
        self.finish(handles);
        CHECK(data == sum_over(self.size, 50'000));
        if (handles.size() == 2) CHECK_EQ(pair[1], 2.0F * static_cast<float>(self.size + 1));
        check_tiny(self);
      }
    });
  }
}

// Else timing would decide in which order a sum is made.
TEST(between_hosts_inputs_ride_along_with_others_under_way) {
  run_hosts({0, 0, 2}, [](TestRank& self) {
    Floats one = values_of(self.rank, 10), two = values_of(self.rank + 1, 20);
    const CheckedCall calls[] = {self.prepare(allreduce(one, "1")),
                                 self.prepare(allreduce(two, "2"))};
    if (self.rank > 0) self.bootstrap.await(1, 1);
    const Handle first = self.submit(calls[0], one.data(), one.data());
    const Handle second = self.submit(calls[1], two.data(), two.data());
    if (self.rank == 0) self.bootstrap.tell(1);
    self.finish({first, second});
    CHECK_EQ(self.buckets(), 0);
  });
}

TEST(a_wire_that_cannot_be_had_is_an_error) {
  LocalBootstrap bootstrap(2);
  run_in_forks(2, [&](int rank) {
    Config config = test_config();
    config.wire = "mpi";
    TestRank self(bootstrap, rank, config, {0, 1});
    CHECK_THROWS(self.start(), ErrorCode::kLibrary);
  });
}

// Leaders name those that they would meet. The other ranks name all, because each of them may need a wire.
TEST(ranks_that_lack_tcp_are_named) {
  struct Case {
    Nodes nodes;
    std::vector<size_t> mute;
    std::vector<std::string> named;  // by rank
  };
  const std::string control = " can't open a TCP socket, and hosts exchange control messages";
  const std::string wire = "rank 3 can't open a TCP socket, and hosts exchange inputs";
  for (const Case& one :
       {Case{{0, 1, 2},
             {0, 2},
             {"ranks 0, 2" + control, "rank 0" + control, "ranks 0, 2" + control}},
        Case{{0, 0, 2, 2}, {3}, {wire, wire, wire, wire}}}) {
    const int ranks = static_cast<int>(one.nodes.size());
    LocalBootstrap bootstrap(ranks);
    run_in_forks(ranks, [&](int rank) {
      TestRank self(bootstrap, rank, test_config(), one.nodes);
      LocalEndpoint endpoint(test_config());
      auto peer_infos = bootstrap.exchange(rank, 0, endpoint.peer_info());
      for (size_t each : one.mute) peer_infos[each].tcp.port = 0;
      const std::string text =
          CHECK_THROWS(self.enter(std::move(endpoint), peer_infos), ErrorCode::kLibrary);
      CHECK(contains(text, "hosts, but " + one.named[static_cast<size_t>(rank)]));
      bootstrap.barrier();
    });
  }
}

// A rank of each host dies, then a leader, in a call or amid large tensors: all others learn who has died, and where.
TEST(deaths_reach_the_other_hosts) {
  for (int victim : {1, 3, 2}) {
    for (size_t n : {size_t{20}, size_t{600'000}}) {
      LocalBootstrap bootstrap(4);
      run_in_forks(4, [&](int rank) {
        TestRank self(bootstrap, rank, test_config(), {0, 0, 2, 2});
        self.start();
        Floats warm = values_of(rank, 60'000);
        Floats data = values_of(rank, n);
        self.run(allreduce(warm, "warm"));
        bootstrap.barrier();
        const int64_t began = now_ns();
        if (rank == victim) {
          self.submit(allreduce(data, "under way"));
          std::_Exit(0);
        }
        Failure failure = self.outcome(allreduce(data, "under way"));
        if (!failure) failure = work_until_failure(self);
        CHECK_EQ(failure.code, ErrorCode::kPeer);
        CHECK(contains(failure.text, "rank " + std::to_string(victim)));
        CHECK(contains(failure.text, "on " + host_name()));
        CHECK(now_ns() - began < 20'000'000'000);
        self.leave();
      });
    }
  }
}

TEST(ranks_that_are_kept_apart_have_leaders_of_their_own) {
  std::vector<PeerInfo> peer_infos(8);
  for (size_t r = 0; r < peer_infos.size(); ++r)
    peer_infos[r].sockets = r == 4 || r == 5 ? "another boot 1 2" : "one boot 1 2";
  peer_infos[2].net_namespace = peer_infos[3].net_namespace = 7;   // in a container of their own
  peer_infos[6].sockets = peer_infos[7].sockets = "one boot 1 3";  // with a /tmp of its own
  std::vector<Rank> leaders;
  for (Rank r = 0; r < 8; ++r) {
    leaders.push_back(nearest_leader(r, {0, 0, 0, 0, 0, 5, 0, 0}, peer_infos));
  }
  CHECK(leaders == (std::vector<Rank>{0, 0, 2, 2, 4, 5, 6, 6}));
}

TEST(ranks_of_other_networks_are_not_called_where_this_host_itself_listens) {
  PeerInfo own, peer;
  own.boot_id = peer.boot_id = "one boot";
  own.tcp.hosts = {"10.0.0.1", "172.17.0.1", "127.0.0.1", "::1"};
  peer.tcp = {{"10.0.0.2", "172.17.0.1", "127.0.0.1", "127.0.1.1", "::1"}, 4711};
  const auto hosts = [&] { return way_to(peer, own).hosts; };
  CHECK(
      hosts() ==
      peer.tcp.hosts);  // one network: jobs whose hosts are simulated, or without any but loopback
  peer.net_namespace = 7;
  CHECK(hosts() == std::vector<std::string>{"10.0.0.2"});
  peer.net_namespace = own.net_namespace;
  peer.boot_id = "another";
  CHECK(hosts() == std::vector<std::string>{"10.0.0.2"});
  CHECK_EQ(way_to(peer, own).port, 4711);
  own.tcp.hosts.clear();
  CHECK(hosts() == (std::vector<std::string>{"10.0.0.2", "172.17.0.1"}));
}

}  // namespace farandole::check
