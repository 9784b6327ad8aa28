// SPDX-License-Identifier: Apache-2.0
// One rank of a simulated world: runs its part of a program on a Runtime, and checks what it gets.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "runtime/runtime.h"
#include "runtime/simulation/program.h"

namespace farandole::simulation {

class World;

class SimulatedRank {
 public:
  SimulatedRank(const Program& program, Topology topology, Config config, World& world);

  // From init to shutdown; on a thread of the simulated kernel.
  void live();
  Runtime* runtime() { return runtime_.get(); }  // null: before and after that
  bool left() const { return left_; }            // it ends, or has ended
  bool done() const { return done_; }
  uint8_t outcome(int call) const { return states_[static_cast<size_t>(call)].outcome; }
  bool leaves_early() const { return early_; }
  int64_t direct_calls() const { return direct_calls_; }
  std::string where() const;  // for messages
  const Topology topology;

 private:
  // One call as this rank makes it.
  struct State {
    uint8_t outcome = 0;
    CheckedCall prepared;
    std::vector<std::vector<std::byte>> inputs, outputs;  // by part
    std::vector<uintptr_t> in, out;
    std::vector<Handle> handles;
    int64_t begun_ns = 0;
  };
  void act(const Action& action);
  void submit(int call, bool more, bool waits);
  void duplicate(int call);
  void pass_batch();
  bool make(int call, State& state);
  farandole_request request_of(int call, int member, size_t part, const Dimensions& shape);
  void begin(int call);
  void wait(int call);
  void wait_all();
  void join(int planned_set);
  void sync(int64_t number);
  void leave(bool failed);
  void finish(int call);
  void end(int call, uint8_t outcome);
  void check_result(int call);
  bool known(int planned_set) const { return ids_.contains(planned_set); }
  const PlannedCall& planned(int call) const { return program_.calls[static_cast<size_t>(call)]; }
  State& state(int call) { return states_[static_cast<size_t>(call)]; }
  [[noreturn]] void fail(const std::string& text) const;

  const Program& program_;
  const Config config_;
  World& world_;
  std::unique_ptr<Runtime> runtime_;
  std::vector<State> states_;                        // by call
  std::map<int, SetId> ids_;                         // of planned sets that have opened here
  std::map<std::pair<int, std::string>, int> last_;  // call of a set's name
  std::vector<int> batch_;
  std::set<int> under_way_;
  size_t next_action_ = 0;
  std::string doing_;
  bool early_ = false, leaves_ = false, left_ = false, done_ = false;
  int64_t direct_calls_ = 0;
};

}  // namespace farandole::simulation
