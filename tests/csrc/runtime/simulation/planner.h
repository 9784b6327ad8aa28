// SPDX-License-Identifier: Apache-2.0
// Makes random programs: windows of calls on random process sets, each submitted by its members in an
// order of their own, and sometimes one event that ends a rank before its time.
#pragma once

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "random.h"
#include "runtime/simulation/program.h"

namespace farandole::simulation {

class Planner {
 public:
  Planner(uint64_t seed, int size);
  Program make(Trouble trouble);

 private:
  static constexpr int64_t kAbortAfter = 2'000'000'000;  // ns

  // Calls
  int new_call(int of_set, Request request);
  std::vector<int> new_calls(int of_set, int count);  // of one window
  // Messages between members. `apart`: no two by the same ranks and tag, so that one end may be missing.
  std::vector<int> new_messages(int of_set, int count, bool apart);
  void spoil_message(int c);
  // Leaves out one end of some of them, whose other end then ends with this. `gone`: only this member's, else
  // two could wait for each other.
  void cut_messages(const std::vector<int>& calls, uint8_t end, int gone = -1);
  bool takes_part(int c, Rank rank);
  Request random_request(int of_set, std::string name);
  Request named_request(int of_set, int number);
  void make_gradient(Request& request);
  std::vector<int> shuffled(const std::vector<int>& calls);
  void group(const std::vector<int>& calls);
  PlannedCall& call(int index) { return program_.calls[static_cast<size_t>(index)]; }
  PlannedSet& set(int index) { return program_.sets[static_cast<size_t>(index)]; }

  // What may be wrong with them
  void spoil(int c);
  void leave_some_empty(int c);
  void make_odd(int c, int member);
  int random_member(int c) { return static_cast<int>(random_.below(call(c).roles.size())); }

  // Windows
  void add_window();
  void work_window(int of_set);
  void training_window(int of_set);
  void calling_window(int of_set);
  void join_window(int of_set);
  void stall_window(int of_set);
  void come_at_the_last_moment(const std::vector<int>& calls, const std::vector<Rank>& ranks,
                               const std::vector<bool>& slow);
  void come_too_late(const std::vector<int>& calls, const std::vector<Rank>& ranks,
                     const std::vector<bool>& slow);
  void set_window();
  void removal_window();
  std::vector<int> reported_before_removal(Rank rank, const std::vector<int>& calls);
  void interrupt();
  // The last sync of a stall comes right before the first of the next, or is the last of all.
  bool ends_stall(int64_t sync) const { return sync + 1 == syncs_ || stalls_.contains(sync + 1); }

  // Actions
  void act(Rank rank, Action action);
  void all_ranks(Action action);
  double batched_share();
  void end_batch(Rank rank);
  void submit(Rank rank, const std::vector<int>& order);
  void submit_and_wait(Rank rank, const std::vector<int>& order);

  check::Random random_;
  Program program_;
  std::vector<int> open_;                            // sets
  std::map<std::pair<int, int>, Request> requests_;  // by set and number of the name
  int names_ = 0;
  int64_t tags_ = 0;
  bool messages_ = false;  // then no rank leaves early: coordinator_messages_test has that
  int64_t syncs_ = 0;
  std::set<int64_t> stalls_;  // first syncs of stall windows
  bool large_ = false;
};

}  // namespace farandole::simulation
