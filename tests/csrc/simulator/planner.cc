// SPDX-License-Identifier: Apache-2.0
// Makes random programs: windows of calls on random process sets, each submitted by its members in an
// order of their own, and sometimes one event that ends a rank before its time.
#include <algorithm>
#include <numeric>
#include <set>
#include <string>

#include "program.h"
#include "random.h"

namespace farandole::simulation {
namespace {

using check::Random;
using Kind = Action::Kind;

constexpr int64_t kAbortAfter = 1'000'000'000;

class Planner {
 public:
  Planner(uint64_t seed, int size) : random_(seed * 8191 + static_cast<uint64_t>(size)) {
    Coordinator::Settings& s = program_.settings;
    s.size = size;
    s.fusion_bytes = size_t{1} << random_.between(12, 18);
    s.capacity = static_cast<size_t>(random_.between(2, 40));
    s.max_sets = random_.between(2, 6);
    s.stall_warn_ns = random_.chance(0.5) ? kAbortAfter / 3 : 0;
    s.stall_abort_ns = kAbortAfter;
    PlannedSet world;
    world.ranks.resize(static_cast<size_t>(size));
    std::iota(world.ranks.begin(), world.ranks.end(), 0);
    program_.sets.push_back(std::move(world));
    program_.actions.resize(static_cast<size_t>(size));
    open_ = {0};
    names_ = random_.between(3, 40);
    large_ = size > 64;
  }

  Program make() {
    for (int windows = large_ ? random_.between(2, 5) : random_.between(3, 14); windows > 0;
         --windows) {
      add_window();
    }
    all_ranks({Kind::kWaitAll, 1});
    if (random_.chance(0.4)) interrupt();
    all_ranks({Kind::kLeave});
    foresee(program_);
    return std::move(program_);
  }

 private:
  // One member's part in a window: calls in the order in which it submits them.
  using Orders = std::vector<std::vector<int>>;

  void act(Rank rank, Action action) {
    program_.actions[static_cast<size_t>(rank)].push_back(action);
  }
  void all_ranks(Action action) {
    for (Rank r : program_.sets[0].ranks) act(r, action);
  }
  PlannedCall& call(int index) { return program_.calls[static_cast<size_t>(index)]; }
  PlannedSet& set(int index) { return program_.sets[static_cast<size_t>(index)]; }

  void add_window() {
    double kind = random_.unit();
    if (kind < 0.12) return set_window();
    if (kind < 0.18 && open_.size() > 1) return removal_window();
    int chosen = random_.chance(0.5) ? 0 : random_.pick(open_);
    if (kind < 0.35) return join_window(chosen);
    if (kind < 0.45) return stall_window(chosen);
    work_window(chosen);
  }

  int new_call(int of_set, Request request) {
    PlannedCall planned;
    planned.set = of_set;
    planned.request = std::move(request);
    planned.roles.assign(set(of_set).ranks.size(), Role::kInput);
    program_.calls.push_back(std::move(planned));
    return static_cast<int>(program_.calls.size()) - 1;
  }

  Request random_request(int of_set, std::string name) {
    constexpr Op kOps[] = {Op::kAllreduce,     Op::kAllreduce, Op::kAllreduce, Op::kBroadcast,
                           Op::kReducescatter, Op::kAllgather, Op::kAlltoall,  Op::kBarrier};
    Request request{0, std::move(name), {}, {}};
    Signature& s = request.signature;
    s.op = kOps[random_.below(std::size(kOps))];
    s.dtype = DType::kInt32;
    constexpr ReduceOp kReduceOps[] = {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMax};
    if (s.op == Op::kAllreduce) s.reduce_op = kReduceOps[random_.below(3)];
    if (s.op == Op::kBroadcast) s.root = random_.pick(set(of_set).ranks);
    if (s.op == Op::kBarrier) return request;
    int64_t length = random_.chance(0.4) ? random_.between(0, 16) : random_.between(300, 9000);
    s.shape = {length};
    if (s.op == Op::kAllgather || s.op == Op::kAlltoall) s.shape = {-1, length};
    return request;
  }

  // A name's request stays what it was, mostly.
  Request named_request(int of_set, int number) {
    std::string name = "t" + std::to_string(number);
    auto [found, fresh] = requests_.try_emplace({of_set, number});
    if (fresh || random_.chance(0.1)) found->second = random_request(of_set, name);
    return found->second;
  }

  // Calls of one window; no name twice. Unnamed ones keep their order on every member.
  std::vector<int> new_calls(int of_set, int count, bool unnamed_only = false) {
    std::vector<int> numbers(static_cast<size_t>(std::max(names_, count)));
    std::iota(numbers.begin(), numbers.end(), 0);
    random_.shuffle(numbers);
    std::vector<int> calls;
    for (int i = 0; i < count; ++i) {
      bool unnamed = unnamed_only || random_.chance(0.3);
      calls.push_back(new_call(of_set, unnamed ? random_request(of_set, "")
                                               : named_request(of_set, numbers[static_cast<size_t>(i)])));
    }
    return calls;
  }

  std::vector<int> shuffled(const std::vector<int>& calls) {
    std::vector<int> order = calls;
    random_.shuffle(order);
    std::vector<int> unnamed;
    for (int c : calls) {
      if (call(c).request.name.empty()) unnamed.push_back(c);
    }
    size_t next = 0;
    for (int& c : order) {
      if (call(c).request.name.empty()) c = unnamed[next++];
    }
    return order;
  }

  void group(const std::vector<int>& calls) {
    std::vector<int> named;
    for (int c : calls) {
      if (!call(c).request.name.empty()) named.push_back(c);
    }
    if (named.size() < 2 || !random_.chance(0.3)) return;
    named.resize(static_cast<size_t>(random_.between(2, static_cast<int>(named.size()))));
    for (int c : named) {
      call(c).batch = named[0];
      call(c).request.group = "g." + call(named[0]).request.name;  // in flight once, as its name is
      call(c).request.signature.group_size = static_cast<int>(named.size());
    }
  }

  int random_member(int c) { return static_cast<int>(random_.below(call(c).roles.size())); }

  void leave_some_empty(int c) {
    if (call(c).request.signature.op == Op::kBarrier) return;
    double share = random_.chance(0.1) ? 1.0 : 0.3;
    for (size_t m = 0; m < call(c).roles.size(); ++m) {
      bool root = call(c).request.signature.root == set(call(c).set).ranks[m];
      Role& role = call(c).roles[m];
      if (!root && role == Role::kInput && random_.chance(share)) role = Role::kEmpty;
    }
  }

  void make_odd(int c, int member) {
    if (call(c).roles.size() < 2) return;
    Request odd = call(c).request_of(member);
    Signature& s = odd.signature;
    switch (random_.below(5)) {
      case 0: s.dtype = DType::kInt64; break;
      case 1: s.shape.push_back(2); break;
      case 2: s.prescale = 0.5; break;
      case 3: s.postscale = 3; break;
      default:
        s.op = Op::kBarrier;
        s.shape.clear();
    }
    bool same = odd.signature == call(c).request.signature;
    if (!same) call(c).odd[member] = odd;
  }

  // Whoever is odd about a group is so about all of it.
  void make_group_odd(int batch, int member) {
    if (call(batch).roles.size() < 2 || !call(batch).odd.empty()) return;
    bool refused = std::ranges::count(call(batch).roles, Role::kRefuse) > 0;
    bool name = refused || random_.chance(0.5);  // a size is a lie: somebody has to contradict it
    int size = random_.between(1, 5);
    for (PlannedCall& c : program_.calls) {
      if (c.batch != batch) continue;
      Request odd = c.request_of(member);
      if (name) odd.group += "'";
      if (!name) odd.signature.group_size = size;
      if (name || size != c.request.signature.group_size) c.odd[member] = odd;
    }
  }

  void spoil(int c) {
    double kind = random_.unit();
    int member = random_member(c);
    int batch = call(c).batch;
    if (kind < 0.2) leave_some_empty(c);
    if (kind < 0.8) return;
    if (kind < 0.87) return make_odd(c, member);
    if (kind < 0.9) return make_odd(c, random_member(c)), make_odd(c, member);
    if (kind < 0.94 && batch >= 0) return make_group_odd(batch, member);
    if (batch >= 0 && !call(batch).odd.empty()) return;
    for (PlannedCall& other : program_.calls) {
      bool together = &other == &call(c) || (batch >= 0 && other.batch == batch);
      if (together) other.roles[static_cast<size_t>(member)] = Role::kRefuse;
    }
  }

  void submit(Rank rank, const std::vector<int>& order) {
    std::vector<int> waits;
    for (int c : order) {
      act(rank, {Kind::kSubmit, c});
      if (random_.chance(0.05)) act(rank, {Kind::kDuplicate, c});
      waits.push_back(c);
    }
    random_.shuffle(waits);
    if (random_.chance(0.5)) {
      for (int c : waits) act(rank, {Kind::kWait, c});
    }
    if (random_.chance(0.7)) act(rank, {Kind::kWaitAll});
  }

  void work_window(int of_set) {
    auto calls = new_calls(of_set, random_.between(1, large_ ? 6 : 12));
    group(calls);
    for (int c : calls) spoil(c);
    for (Rank r : set(of_set).ranks) submit(r, shuffled(calls));
  }

  // Members run out of data at different times.
  void join_window(int of_set) {
    auto calls = new_calls(of_set, random_.between(1, 8));
    for (int c : calls) call(c).joins = true;
    const auto& ranks = set(of_set).ranks;
    for (size_t m = 0; m < ranks.size(); ++m) {
      size_t count = random_.below(calls.size() + 1);
      std::vector<int> mine(calls.begin(), calls.begin() + static_cast<long>(count));
      for (size_t i = count; i < calls.size(); ++i) call(calls[i]).roles[m] = Role::kMissing;
      submit(ranks[m], shuffled(mine));
      act(ranks[m], {Kind::kJoin, of_set});
    }
  }

  // Some members come too late, or never; between two points where nobody waits for anything else.
  void stall_window(int of_set) {
    const auto& ranks = set(of_set).ranks;
    if (ranks.size() < 2) return;
    auto calls = new_calls(of_set, random_.between(1, 4));
    group(calls);
    std::vector<bool> slow(ranks.size());
    for (size_t m = 0; m < ranks.size(); ++m) slow[m] = random_.chance(0.4);
    size_t prompt = random_.below(ranks.size());
    slow[(prompt + 1) % ranks.size()] = true;
    slow[prompt] = false;
    all_ranks({Kind::kWaitAll, 1});
    stalls_.insert(syncs_);
    all_ranks({Kind::kSync, syncs_++});
    if (random_.chance(0.5)) {
      come_at_the_last_moment(calls, ranks, slow);
    } else {
      come_too_late(calls, ranks, slow);
    }
    all_ranks({Kind::kSync, syncs_++});
  }

  void come_at_the_last_moment(const std::vector<int>& calls, const std::vector<Rank>& ranks,
                               const std::vector<bool>& slow) {
    for (int c : calls) call(c).allowed = kDone | kStalled;
    for (size_t m = 0; m < ranks.size(); ++m) {
      int64_t pause = kAbortAfter + random_.between(-20'000, 20'000);
      if (slow[m]) act(ranks[m], {Kind::kPause, pause});
      submit_and_wait(ranks[m], shuffled(calls));
    }
  }

  void come_too_late(const std::vector<int>& calls, const std::vector<Rank>& ranks,
                     const std::vector<bool>& slow) {
    std::vector<int> late;  // an unnamed call must be made: it has its place in the order
    for (int c : calls) {
      call(c).allowed = kStalled;
      if (call(c).request.name.empty() || random_.chance(0.5)) late.push_back(c);
    }
    for (size_t m = 0; m < ranks.size(); ++m) {
      if (!slow[m]) submit_and_wait(ranks[m], shuffled(calls));
    }
    all_ranks({Kind::kSync, syncs_++});
    for (size_t m = 0; m < ranks.size(); ++m) {
      if (!slow[m]) continue;
      submit_and_wait(ranks[m], shuffled(late));
      for (int c : calls) {
        if (std::ranges::count(late, c) == 0) call(c).roles[m] = Role::kMissing;
      }
    }
  }

  void submit_and_wait(Rank rank, const std::vector<int>& order) {
    for (int c : order) act(rank, {Kind::kSubmit, c});
    act(rank, {Kind::kWaitAll, 1});
  }

  void set_window() {
    std::vector<int64_t> ranks;
    double share = random_.unit();
    for (Rank r : set(0).ranks) {
      if (random_.chance(share)) ranks.push_back(r);
    }
    if (random_.chance(0.2)) {  // again
      const auto& known = set(random_.pick(open_)).ranks;
      ranks.assign(known.begin(), known.end());
    }
    if (random_.chance(0.1)) ranks.push_back(program_.settings.size);  // no such rank
    Request request{0, random_.chance(0.5) ? "add" : "", {}, {}};
    request.signature.op = Op::kAddSet;
    request.signature.shape = ranks;
    int c = new_call(0, request);
    call(c).roles.assign(call(c).roles.size(), Role::kEmpty);
    bool known = std::ranges::any_of(
        open_, [&](int s) { return std::ranges::equal(set(s).ranks, ranks); });
    bool sound = !ranks.empty() && ranks.back() < program_.settings.size && !known &&
                 std::cmp_less(open_.size(), program_.settings.max_sets);
    call(c).allowed = sound ? kDone : kInvalid;
    if (sound) {
      open_.push_back(static_cast<int>(program_.sets.size()));
      program_.sets.push_back({std::vector<Rank>(ranks.begin(), ranks.end()), c});
    }
    for (Rank r : set(0).ranks) submit_and_wait(r, {c});
  }

  // Some calls are under way in the set when it goes.
  void removal_window() {
    int gone = open_[1 + random_.below(open_.size() - 1)];
    std::erase(open_, gone);
    all_ranks({Kind::kWaitAll, 1});
    auto calls = new_calls(gone, random_.between(0, 4));
    Request request{0, random_.chance(0.5) ? "remove" : "", {}, {}};
    request.signature.op = Op::kRemoveSet;
    int c = new_call(0, request);
    for (int under_way : calls) {
      call(under_way).allowed = kDone | kInvalid;
      call(under_way).ended_by = c;
    }
    call(c).removes = gone;
    call(c).roles.assign(call(c).roles.size(), Role::kEmpty);
    call(c).allowed = kDone;
    for (Rank r : set(0).ranks) {
      int member = set(gone).member_of(r);
      std::vector<int> order = member < 0 ? std::vector<int>{} : shuffled(calls);
      std::vector<int> mine;
      for (int of_set : order) {
        bool unnamed = call(of_set).request.name.empty();
        if (unnamed || random_.chance(0.7)) {
          mine.push_back(of_set);
        } else {
          call(of_set).roles[static_cast<size_t>(member)] = Role::kMissing;
          call(of_set).allowed = kInvalid;
        }
      }
      mine.insert(mine.begin() + static_cast<long>(random_.below(mine.size() + 1)), c);
      submit_and_wait(r, mine);
    }
  }

  void interrupt() {
    auto& actions = program_.actions[random_.below(program_.actions.size())];
    constexpr Kind kEnds[] = {Kind::kLeave, Kind::kLeave, Kind::kFail, Kind::kDie};
    Kind end = kEnds[random_.below(4)];
    size_t cut = random_.below(actions.size() + 1);
    if (end == Kind::kLeave) {  // not within a stall: the others would be out of step
      bool inside = false;
      for (size_t i = 0; i < cut || inside; ++i) {
        if (actions[i].kind == Kind::kSync) inside = !ends_stall(actions[i].value);
        cut = std::max(cut, i + 1);
      }
    }
    actions.resize(cut);
    actions.push_back({end});
  }

  // The last sync of a stall comes right before the first of the next, or is the last of all.
  bool ends_stall(int64_t sync) const { return sync + 1 == syncs_ || stalls_.contains(sync + 1); }

  Random random_;
  Program program_;
  std::vector<int> open_;  // sets
  std::map<std::pair<int, int>, Request> requests_;  // by set and number of the name
  int names_ = 0;
  int64_t syncs_ = 0;
  std::set<int64_t> stalls_;  // first syncs of stall windows
  bool large_ = false;
};

}  // namespace

int PlannedSet::member_of(Rank rank) const {
  auto found = std::ranges::lower_bound(ranks, rank);
  return found == ranks.end() || *found != rank ? -1 : static_cast<int>(found - ranks.begin());
}

const Request& PlannedCall::request_of(int member) const {
  auto found = odd.find(member);
  return found == odd.end() ? request : found->second;
}

Program plan(uint64_t seed, int size) { return Planner(seed, size).make(); }

}  // namespace farandole::simulation
