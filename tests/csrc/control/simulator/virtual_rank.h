// SPDX-License-Identifier: Apache-2.0
// One rank as the coordinator sees it: runs its part of a program, reports, follows the log, moves
// buckets. Checks on the way whatever a rank can check.
#pragma once

#include <deque>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "control/protocol/message.h"
#include "control/simulator/program.h"

namespace farandole::simulation {

class Simulator;

class VirtualRank {
 public:
  VirtualRank(const Program& program, Rank rank, Simulator& world);

  // Goes on with the program until it has to wait.
  void step();
  // The next entry of the log; it stays where it is until the end of the simulation.
  void read(const Entry& entry);
  // The oldest bucket of this set's lane is done.
  void finish_bucket(SetId set);

  // It has died, or read the log to its end and moved all its buckets.
  bool done() const;
  bool dead() const { return dead_; }
  void die() { dead_ = true; }
  bool aborted() const { return aborted_; }
  uint8_t outcome(int call) const { return outcomes_[static_cast<size_t>(call)]; }
  const std::vector<const Request*>& table() const { return by_id_; }
  int duplicates() const { return duplicates_; }
  std::string where() const;  // for messages
  // Fails the test if anything is left over.
  void check_end() const;

 private:
  struct Name {
    uint32_t id = 0;
    int call = -1;                 // in flight
    bool reported = false;         // not yet settled by the log
    std::deque<int> refused = {};  // calls that it has refused before, and the log has not answered
    std::deque<int> refused_since = {};  // and after that report
  };
  struct Unnamed {
    uint64_t next = 0;
    std::map<uint64_t, int> waiting;  // calls
  };
  struct OpenedSet {
    int planned = 0;
    bool closed = false;
    bool join_sent = false;
    Unnamed unnamed;
    std::deque<std::pair<uint64_t, std::vector<int>>> lane;  // bucket, calls
    std::vector<Rank> pair;                                  // its ranks; empty: it is no pair
  };

  void on(const Define& define);
  void on(const Forget& forget);
  void on(const Run& run);
  void on(const Result& result);
  void on(const Fail& fail);
  void on(const Joined& joined);
  void on(const Matched& matched);
  void on(const OpenSet& open);
  void on(const CloseSet& close);
  void on(const Abort& abort);
  void on(const Stop& stop);
  void on(const CollectStacks& where);
  void on(const Notice& notice);
  void on(const Inform& inform);
  void on(const SetUp& step);

  bool perform(const Action& action);  // false: must wait
  bool submit(int call, bool more);
  std::string site_of(int index) const;
  void report_call(int call, int member, Request request, OpenedSet& set);
  void post(int call, int member, Request request);
  bool wait(int call);
  bool wait_all(bool refused_too);
  bool join(int planned);
  bool sync(int64_t number);
  bool pause(int64_t ns);
  void leave(bool failed);

  OpenedSet* set_of(int planned, SetId& id);
  Name& name_of(SetId set, const std::string& name) { return names_[{set, name}]; }
  void report(const Report& report);
  void send(const Report& report);
  void send_batch();
  void hurry();  // a user waits
  void take_item(const Run& run, const Item& item, std::vector<int>& calls);
  int take(const CallKey& key);  // the call that the log settles; -1: not ours
  int take(uint32_t id, uint64_t sequence);
  void end(int call, uint8_t outcome);
  const PlannedCall& planned(int call) const { return program_.calls[static_cast<size_t>(call)]; }
  [[noreturn]] void fail(const std::string& text) const;

  const Program& program_;
  const Rank rank_;
  Simulator& world_;
  size_t next_action_ = 0;
  bool announced_ = false;  // its join, or that it has come to a sync
  int64_t pause_until_ = -1;

  std::map<SetId, OpenedSet> sets_;
  std::map<int, SetId> ids_;  // of planned sets
  std::map<std::pair<SetId, std::string>, Name> names_;
  std::map<uint64_t, int> posted_;  // sends and receives that have not met their other end
  uint64_t next_post_ = 0;
  std::map<std::string, uint32_t> interned_;  // requests of unnamed calls
  std::vector<const Request*> by_id_;
  IdRuns batch_;           // ready, and not yet reported
  bool in_batch_ = false;  // the call being made is one of several
  bool expedited_ = false;
  std::vector<uint8_t> outcomes_;  // by call; 0: none yet
  int in_flight_ = 0;
  std::set<int> refused_;  // of these: calls that it refused itself
  int duplicates_ = 0;
  bool left_ = false;
  bool dead_ = false;
  bool aborted_ = false;
  bool stopped_ = false;
};

}  // namespace farandole::simulation
