// SPDX-License-Identifier: Apache-2.0
// Calls, and what may be wrong with them. The windows that they belong to are in planner_windows.cc.
#include "runtime/simulation/planner.h"

#include <algorithm>
#include <numeric>

namespace farandole::simulation {

using Kind = Action::Kind;

Planner::Planner(uint64_t seed, int size) : random_(seed * 8191 + static_cast<uint64_t>(size)) {
  Coordinator::Settings& s = program_.settings;
  s.size = size;
  s.fusion_bytes = size_t{1} << random_.between(12, 18);
  s.capacity = static_cast<size_t>(random_.between(2, 40));
  s.max_sets = random_.between(2, 6);
  s.stall_warn_ns = random_.chance(0.5) ? kAbortAfter / 3 : 0;
  s.stall_abort_ns = kAbortAfter;
  if (random_.chance(0.5)) s.capacity += 40;
  PlannedSet world;
  world.ranks.resize(static_cast<size_t>(size));
  std::iota(world.ranks.begin(), world.ranks.end(), 0);
  program_.sets.push_back(std::move(world));
  program_.actions.resize(static_cast<size_t>(size));
  open_ = {0};
  names_ = random_.between(3, 40);
  large_ = size > 64;
  messages_ = random_.chance(0.5);
}

Program Planner::make(Trouble trouble) {
  program_.trouble = trouble;
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

void Planner::act(Rank rank, Action action) {
  program_.actions[static_cast<size_t>(rank)].push_back(action);
}

void Planner::all_ranks(Action action) {
  for (Rank r : program_.sets[0].ranks) act(r, action);
}

int Planner::new_call(int of_set, Request request) {
  PlannedCall planned;
  planned.set = of_set;
  planned.request = std::move(request);
  planned.roles.assign(set(of_set).ranks.size(), Role::kInput);
  program_.calls.push_back(std::move(planned));
  return static_cast<int>(program_.calls.size()) - 1;
}

Request Planner::random_request(int of_set, std::string name) {
  constexpr Op kOps[] = {Op::kAllreduce,     Op::kAllreduce, Op::kAllreduce, Op::kBroadcast,
                         Op::kReducescatter, Op::kAllgather, Op::kAlltoall,  Op::kScatter,
                         Op::kBarrier,       Op::kReduce};
  Request request{0, std::move(name), {}};
  Signature& s = request.signature;
  s.op = kOps[random_.below(std::size(kOps))];
  s.dtype = DType::kInt32;
  constexpr ReduceOp kReduceOps[] = {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMax};
  if (s.traits().pattern == Pattern::kReduceToAll) s.reduce_op = kReduceOps[random_.below(3)];
  if (s.traits().rooted()) s.root = random_.pick(set(of_set).ranks);
  if (s.op == Op::kBarrier) return request;
  int64_t length = random_.chance(0.4) ? random_.between(0, 16) : random_.between(300, 9000);
  s.shape = {length};
  if (s.traits().ragged()) s.shape = {-1, length};
  return request;
}

// A name's request stays what it was, mostly.
Request Planner::named_request(int of_set, int number) {
  std::string name = "t" + std::to_string(number);
  auto [found, fresh] = requests_.try_emplace({of_set, number});
  if (fresh || random_.chance(0.1)) found->second = random_request(of_set, name);
  return found->second;
}

// Calls of one window; no name twice. Unnamed ones keep their order on every member.
std::vector<int> Planner::new_calls(int of_set, int count) {
  std::vector<int> numbers(static_cast<size_t>(std::max(names_, count)));
  std::iota(numbers.begin(), numbers.end(), 0);
  random_.shuffle(numbers);
  std::vector<int> calls;
  for (int i = 0; i < count; ++i) {
    bool unnamed = random_.chance(0.3);
    calls.push_back(new_call(of_set, unnamed
                                         ? random_request(of_set, "")
                                         : named_request(of_set, numbers[static_cast<size_t>(i)])));
  }
  return calls;
}

std::vector<int> Planner::shuffled(const std::vector<int>& calls) {
  std::vector<int> order = calls;
  random_.shuffle(order);
  // What is matched by order: unnamed calls, and the messages of one tag.
  auto line_of = [this](int c) -> int64_t {
    if (call(c).message()) return call(c).tag;
    return call(c).request.name.empty() ? 0 : -1;
  };
  std::map<int64_t, std::vector<int>> lines;
  for (int c : calls) lines[line_of(c)].push_back(c);
  std::map<int64_t, size_t> next;
  for (int& c : order) {
    const int64_t line = line_of(c);
    if (line >= 0) c = lines[line][next[line]++];
  }
  return order;
}

std::vector<int> Planner::new_messages(int of_set, int count, bool apart) {
  std::vector<int> calls;
  const auto members = std::ssize(set(of_set).ranks);
  if (members < 2 || !messages_ || random_.chance(0.3)) return calls;
  const int64_t shared = ++tags_;
  for (; count > 0; --count) {
    const auto sender = static_cast<int>(random_.below(static_cast<uint64_t>(members)));
    const auto step = 1 + static_cast<int>(random_.below(static_cast<uint64_t>(members) - 1));
    Request request{0, {}, {}};
    request.signature.op = Op::kSend;
    request.signature.dtype = DType::kInt32;
    request.signature.root = set(of_set).ranks[static_cast<size_t>(sender)];
    request.signature.shape = {random_.chance(0.5) ? random_.between(0, 16)
                                                   : random_.between(300, 9000)};
    const int c = new_call(of_set, request);
    PlannedCall& message = call(c);
    message.sender = sender;
    message.receiver = static_cast<int>((sender + step) % members);
    message.from_any = random_.chance(0.3);
    const bool own = apart || message.from_any || program_.late();
    message.tag = own ? ++tags_ : shared;
    message.roles.assign(message.roles.size(), Role::kMissing);
    message.roles[static_cast<size_t>(message.sender)] = Role::kInput;
    message.roles[static_cast<size_t>(message.receiver)] = Role::kEmpty;
    calls.push_back(c);
  }
  return calls;
}

void Planner::spoil_message(int c) {
  PlannedCall& message = call(c);
  const int end = random_.chance(0.5) ? message.sender : message.receiver;
  const double kind = random_.unit();
  if (kind < 0.1) message.roles[static_cast<size_t>(end)] = Role::kRefuse;
  if (kind < 0.1 || kind > 0.2) return;
  Request odd = message.request;
  if (random_.chance(0.5)) odd.signature.dtype = DType::kInt64;
  odd.signature.shape[0] += 1;
  message.odd[message.receiver] = odd;
}

void Planner::cut_messages(const std::vector<int>& calls, uint8_t end, int gone) {
  for (int c : calls) {
    PlannedCall& message = call(c);
    const int either = random_.chance(0.5) ? message.sender : message.receiver;
    const int missing = gone < 0 ? either : gone;
    const bool has = missing == message.sender || missing == message.receiver;
    if (!has || random_.chance(0.4)) continue;
    message.roles[static_cast<size_t>(missing)] = Role::kMissing;
    message.from_any = message.from_any && gone < 0;  // others might still send
    message.allowed = end;
  }
}

bool Planner::takes_part(int c, Rank rank) {
  if (!call(c).message()) return true;
  return call(c).roles[static_cast<size_t>(set(call(c).set).member_of(rank))] != Role::kMissing;
}

void Planner::group(const std::vector<int>& calls) {
  for (int c : calls) {
    Request& request = call(c).request;
    if (request.signature.op != Op::kAllreduce || !random_.chance(0.2)) continue;
    for (int more = random_.between(1, 3); more > 0; --more) {
      request.more.push_back(request.signature);
      request.more.back().shape = {random_.between(0, 3000)};
    }
  }
}

void Planner::leave_some_empty(int c) {
  if (call(c).request.signature.op == Op::kBarrier) return;
  double share = random_.chance(0.1) ? 1.0 : 0.3;
  for (size_t m = 0; m < call(c).roles.size(); ++m) {
    bool root = call(c).request.signature.root == set(call(c).set).ranks[m];
    Role& role = call(c).roles[m];
    if (!root && role == Role::kInput && random_.chance(share)) role = Role::kEmpty;
  }
}

namespace {

std::vector<int64_t> one_more(const Dimensions& shape) {
  std::vector<int64_t> longer(shape.begin(), shape.end());
  longer.push_back(2);
  return longer;
}

}  // namespace

void Planner::make_odd(int c, int member) {
  if (call(c).roles.size() < 2) return;
  Request odd = call(c).request_of(member);
  Signature& s = odd.signature;
  const bool reduces = s.op == Op::kAllreduce;
  switch (random_.below(reduces ? 6 : s.traits().reduces() ? 5 : 3)) {
    case 0: s.dtype = DType::kInt64; break;
    case 1: s.shape = one_more(s.shape); break;
    case 2: s.op = Op::kBarrier, s.shape = {}, odd.more.clear(); break;
    case 3: s.prescale = 0.5; break;
    case 4: s.postscale = 3; break;
    default: odd.more.resize(odd.more.empty() ? 2 : odd.more.size() - 1, s);
  }
  if (!same_terms(odd, call(c).request)) call(c).odd[member] = odd;
}

void Planner::spoil(int c) {
  double kind = random_.unit();
  int member = random_member(c);
  if (kind < 0.2) leave_some_empty(c);
  if (kind < 0.8) return;
  if (kind < 0.87) return make_odd(c, member);
  if (kind < 0.9) return make_odd(c, random_member(c)), make_odd(c, member);
  call(c).roles[static_cast<size_t>(member)] = Role::kRefuse;
}

int PlannedSet::member_of(Rank rank) const {
  auto found = std::ranges::lower_bound(ranks, rank);
  return found == ranks.end() || *found != rank ? -1 : static_cast<int>(found - ranks.begin());
}

const Request& PlannedCall::request_of(int member) const {
  auto found = odd.find(member);
  return found == odd.end() ? request : found->second;
}

Program plan(uint64_t seed, int size, Trouble trouble) { return Planner(seed, size).make(trouble); }

}  // namespace farandole::simulation
