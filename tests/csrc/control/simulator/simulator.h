// SPDX-License-Identifier: Apache-2.0
// Drives one coordinator with many virtual ranks. Reports and log entries travel as bytes through queues
// with random delays; the time jumps from event to event. The same seed gives the same run.
#pragma once

#include <deque>
#include <memory>
#include <queue>
#include <set>
#include <string>
#include <vector>

#include "control/hosts/aggregator.h"
#include "control/hosts/host_tree.h"
#include "control/simulator/virtual_rank.h"
#include "random.h"

namespace farandole::simulation {

struct Statistics {
  int64_t reports = 0;
  int64_t entries = 0;
  int64_t buckets = 0;
  int64_t ends[256] = {};  // by Outcome
  int64_t duplicates = 0;
  int64_t forgotten = 0;
  int64_t notices = 0;
  int64_t batches = 0;         // reports of several calls
  int64_t group_reports = 0;   // of all ranks of a host at once
  int64_t nested_reports = 0;  // those of a host below a host
  int64_t deaths = 0;          // at any moment, not as planned
  void add(const Statistics& other);
};

// One line, for traces.
std::string text_of(const Report& report);
std::string text_of(const Entry& entry);

class Simulator {
 public:
  Simulator(const Program& program, uint64_t seed, bool trace);
  // `rank` dies before that event, wherever it is in its program, unless it would be the last that lives.
  void doom(Rank rank, uint64_t event) { dooms_.emplace(event, rank); }
  int living() const;
  // Fails the test if an invariant breaks, or if nothing happens any more before the log has stopped.
  Statistics run();

  // ---- What a virtual rank does to the world around it
  int64_t now() const { return now_; }
  void report(Rank from, const Report& report);
  void start_lane(Rank rank, SetId set);  // finish_bucket() will be called in time
  void step_after(Rank rank, int64_t ns);
  void reach(Rank rank, int64_t sync);  // and all before; the next ones have higher numbers
  bool passed(int64_t sync) const { return sync <= passed_; }  // all have reached it
  void die(Rank rank);
  bool pause_here() { return random_.chance(0.2); }
  // Each call that the log settles is checked against the oracle once.
  void settled(int call, const Run& run, const Item& item);
  void settled(int call, const Result& result);

 private:
  enum class What : uint8_t { kStep, kRead, kLane, kServe, kLose, kRelay };
  struct Event {
    int64_t time;
    uint64_t order;  // events of one time keep the order in which they were made
    What what;
    Rank rank;
    SetId set;
    bool operator>(const Event& other) const {
      return time != other.time ? time > other.time : order > other.order;
    }
  };
  struct Member {
    std::unique_ptr<VirtualRank> rank;
    std::deque<ByteString> inbox;  // its reports, at the coordinator's end
    size_t cursor = 0;             // in the log
    bool reading = false;          // will read
    int64_t sync = -1;
  };

  // A host apart from the root's. The inbox of a leader below the root holds records.
  struct Host {
    Host(int size, HostTree its_tree, const std::vector<Rank>& its_ranks,
         const std::vector<Rank>& its_below)
        : tree(std::move(its_tree)),
          ranks(its_ranks),
          below(its_below),
          aggregator(size, its_below, tree.parent != 0) {}
    const HostTree tree;
    const std::vector<Rank> ranks;  // its own
    const std::vector<Rank> below;  // and those of the hosts below
    int group = -1;                 // the coordinator's number, if the host is below the root
    Aggregator aggregator;
    std::deque<std::pair<Rank, ByteString>> reports;  // of its ranks; records of a leader below
    size_t cursor = 0;                                // in the log
    bool relaying = false;
  };
  void settle_on_hosts();
  Host* host_of(Rank rank);  // nullptr: the root's
  void relay(Rank leader);
  void read_log(Host& host);
  void receive_report(Host& host, Rank from, ByteView message);
  void expect_relay(Host& host, int64_t in_ns);
  void send(Rank sender, ByteString message);
  void take(Rank from, const Report& report);
  void receive_records(Rank leader, ByteView message);
  void after(int64_t delay, What what, Rank rank, SetId set = 0);
  int64_t delay(int64_t most) {
    return 1 + static_cast<int64_t>(random_.below(static_cast<uint64_t>(most)));
  }
  void handle(const Event& event);
  bool all_done();
  void let_die();
  void print(const std::string& line) const;
  void read(Rank rank);
  void serve();
  void receive(Rank from);
  void publish();
  void check_entry(const Entry& entry);
  void check_bucket(const Run& run);
  void check_definition(const Define& define);
  void check_end();
  void check_calls();
  Member& member(Rank rank) { return members_[static_cast<size_t>(rank)]; }

  const Program& program_;
  check::Random random_;
  bool trace_;
  Coordinator coordinator_;
  std::vector<Member> members_;
  std::map<Rank, Host> hosts_;   // by leader
  std::vector<Rank> leader_of_;  // by rank; -1: on the root's host
  int64_t passed_ = -1;          // syncs
  size_t finished_ = 0;          // of members_, from the front
  std::vector<Rank> senders_;    // whose inbox is not empty
  bool serving_ = false;
  std::deque<Entry> log_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  uint64_t order_ = 0;
  uint64_t handled_ = 0;                 // events
  std::multimap<uint64_t, Rank> dooms_;  // by event
  int64_t now_ = 0;

  // What the coordinator may rely on, and what it must keep.
  struct Buckets {
    uint64_t published = 0;
    uint64_t done = 0;
  };
  std::map<SetId, Buckets> buckets_;
  std::map<uint32_t, Request> table_;
  std::map<uint32_t, std::set<Rank>> dropped_;  // ids being forgotten, and who has
  std::vector<uint64_t> bucket_of_;             // by call; 0: none
  std::vector<bool> checked_;                   // by call
  size_t left_ = 0;                             // ranks
  bool aborted_ = false;
  size_t stuck_ = 0;  // calls that were given up: they may hold their ids
  Statistics statistics_;
};

}  // namespace farandole::simulation
