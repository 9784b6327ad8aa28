// SPDX-License-Identifier: Apache-2.0
// Whole ranks, each a Runtime with all its threads, on simulated hosts in one thread. The same seed gives the same run.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "runtime/simulation/kernel.h"
#include "runtime/simulation/network.h"
#include "runtime/simulation/program.h"
#include "runtime/simulation/rank.h"

namespace farandole::simulation {

struct Statistics {
  int64_t ends[256] = {};  // by Outcome
  int64_t turns = 0;
  int64_t direct = 0;  // calls completed in cells
  int64_t duplicates = 0;
  int64_t deaths = 0;         // at any moment, not as planned
  int64_t leaders = 0;        // among them
  int64_t stops = 0;          // longer than others wait
  int64_t cuts = 0;           // links that have ended or lost something
  int64_t several_hosts = 0;  // worlds
  void add(const Statistics& other);
};

class World {
 public:
  // Numbers that threads sleep on.
  static constexpr uint64_t kUp = 1, kSyncs = 2, kPauses = 3;

  World(const Program& program, uint64_t seed, bool trace);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;
  // `rank` dies so many turns after all have started, wherever it is, unless it would be the last that lives.
  void doom(Rank rank, uint64_t turns) {
    faults_.emplace(turns, [this, rank] { let_die(rank); });
  }
  int living() const { return static_cast<int>(ranks_.size() - dead_.size()); }
  // Fails the test if a rank gets what the program does not allow, or nothing in time.
  Statistics run();

  // ---- For the ranks
  Kernel& kernel() { return kernel_; }
  // Returns once all ranks have started.
  void start(const SimulatedRank& rank, const Config& config, std::unique_ptr<Runtime>& runtime);
  void reach(Rank rank, int64_t sync);  // and all before; the next ones have higher numbers
  bool passed(int64_t sync) const { return sync <= passed_; }  // all have reached it
  void die_now(Rank rank);                                     // the calling thread's own
  void job_breaks(Rank rank);                                  // all calls end soon
  void check_in_time(int64_t begun_ns);
  void check_wait(Rank rank, int64_t begun_ns) const;  // of one call, that has just ended
  void makes(int call) { made_ns_[call] = now_ns(); }  // a rank makes its part of it
  void joins() { joined_ns_ = now_ns(); }
  // Fails if a call that has worked and was waited for since then ends long after its last rank has made it.
  void check_prompt(Rank rank, int call, int64_t begun_ns);
  // A rank has seen the job's end without being asked to leave.
  void count_broken() { broke_ = true; }
  bool troubled() const { return troubled_; }
  void count_duplicate() { ++statistics_.duplicates; }
  // Fails, and tells what each rank does now.
  [[noreturn]] void give_up(const std::string& why) const;

 private:
  std::vector<Rank> settle_on_hosts();
  void make_faults();
  std::pair<Rank, Rank> two_hosts();
  using Carries = Network::Carries;
  Carries random_carried();
  void make_due_faults();
  void tell(const std::string& what) const;
  void stop(Rank rank, int64_t for_ns);
  void cut(Rank one, Rank other);
  bool gone(Rank rank) const { return dead_.contains(rank) || frozen_.contains(rank); }
  void let_die(Rank rank);
  void die(Rank rank);
  void tell(Rank to, Rank dead);
  bool all_done() const;
  void check_calls();

  const Program& program_;
  const bool trace_;
  Statistics statistics_;
  Kernel kernel_;
  check::Random random_;
  const std::vector<Rank> node_;
  const int fan_out_;
  const int64_t prompt_ns_;  // for which a call may last that all ranks have made
  Network network_;
  std::vector<PeerInfo> peer_infos_;
  std::map<Rank, Config> configs_;
  std::vector<std::unique_ptr<SimulatedRank>> ranks_;
  std::set<Rank> dead_;
  std::set<Rank> frozen_;       // stopped for ever
  std::vector<int64_t> syncs_;  // by rank
  int64_t passed_ = -1;
  size_t up_ = 0;
  uint64_t turns_ = 0;                                     // since all are up
  std::multimap<uint64_t, std::function<void()>> faults_;  // by turn
  int64_t broken_ns_ = 0;                                  // since when the job is to fail
  bool broke_ = false;
  bool troubled_ = false;  // the program's trouble has begun
  int64_t hurt_ns_ = 0;    // when the last fault began, or a rank went on
  int64_t patience_ns_;    // for which a call waits after that
  uint64_t rescued_ = 0;
  bool even_ = true;                // no link is slow, and no rank stops
  std::map<int, int64_t> made_ns_;  // when the last rank made each call
  int64_t joined_ns_ = 0;           // when the last rank joined
};

}  // namespace farandole::simulation
