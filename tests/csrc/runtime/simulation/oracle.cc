// SPDX-License-Identifier: Apache-2.0
// Knows from the program alone how each call must end, and with what result.
#include <algorithm>
#include <set>
#include <string>

#include "check.h"
#include "runtime/simulation/program.h"

namespace farandole::simulation {
namespace {

using Kind = Action::Kind;

const PlannedSet& set_of(const Program& program, const PlannedCall& call) {
  return program.sets[static_cast<size_t>(call.set)];
}

bool reports(const PlannedCall& call, int member) {
  Role role = call.roles[static_cast<size_t>(member)];
  return role == Role::kInput || role == Role::kEmpty;
}

bool brings_input(const Program& program, const PlannedCall& call, int member) {
  const Signature& s = call.request_of(member).signature;
  bool holds =
      !s.traits().from_root() || s.root == set_of(program, call).ranks[static_cast<size_t>(member)];
  return call.roles[static_cast<size_t>(member)] == Role::kInput && s.op != Op::kBarrier && holds;
}

// What it ends with if nothing but its members' roles matters.
uint8_t natural_end(const Program& program, const PlannedCall& call) {
  if (std::ranges::count(call.roles, Role::kRefuse) > 0) return kRefused;
  const Request* terms = nullptr;
  bool input = false, root = false;
  for (int m = 0; m < std::ssize(call.roles); ++m) {
    if (!reports(call, m)) continue;
    const Request& mine = call.request_of(m);
    if (!terms) terms = &mine;
    if (!same_terms(*terms, mine)) return kMismatched;
    const bool brings = brings_input(program, call, m);
    input = input || brings;
    root = root ||
           (brings && set_of(program, call).ranks[static_cast<size_t>(m)] == mine.signature.root);
  }
  if (!terms) return kDone;  // nobody calls
  if (terms->signature.traits().rooted() && !root) return kInvalid;
  return input || terms->signature.op == Op::kBarrier ? kDone : kAbsent;
}

struct Departure {
  Rank rank = -1;
  Kind kind = Kind::kLeave;
  std::set<int64_t> submitted;
};

// The rank that ends before its program does; rank -1: none.
Departure early_departure(const Program& program) {
  for (size_t r = 0; r < program.actions.size(); ++r) {
    const auto& actions = program.actions[r];
    auto ends = [](const Action& a) {
      return a.kind == Kind::kLeave || a.kind == Kind::kFail || a.kind == Kind::kDie;
    };
    auto end = std::ranges::find_if(actions, ends);
    if (end + 1 == actions.end()) continue;
    Departure early{static_cast<Rank>(r), end->kind, {}};
    for (auto a = actions.begin(); a != end; ++a) {
      if (a->kind == Kind::kSubmit || a->kind == Kind::kCall) early.submitted.insert(a->value);
    }
    return early;
  }
  return {};
}

// Who is late for a call that others have given up would meet their next one of its name.
void use_names_once(Program& program) {
  const auto rename = [](Request& request, const std::string& call) {
    if (!request.name.empty()) request.name += call;
  };
  for (size_t c = 0; c < program.calls.size(); ++c) {
    PlannedCall& call = program.calls[c];
    const std::string own = "." + std::to_string(c);
    rename(call.request, own);
    for (auto& [member, request] : call.odd) rename(request, own);
  }
}

// Sets change without the leaver. Only a set of which it would be a member is not made, so there may be room for
// another.
void foresee_change(PlannedCall& call, Rank leaver, bool was_in) {
  const Signature& s = call.request.signature;
  const bool names_it = s.op == Op::kAddSet && std::ranges::count(s.shape, leaver) > 0;
  if (was_in) {
    call.allowed |= kPeerGone;
  } else if (names_it) {
    call.allowed = kPeerGone | (call.allowed & kInvalid);
  }
  if (!names_it && (call.allowed & kInvalid) != 0) call.allowed |= kDone;
}

// Calls that the leaver would have to be in fail; those that it was in may have been too late.
void foresee_leave(Program& program, const Departure& early) {
  // The leave ends joins early: a message to a rank that had joined waits until it is given up. So does one
  // from any rank, while others might send it.
  const bool waits = std::ranges::any_of(program.calls, [&](const PlannedCall& call) {
    if (!call.message()) return false;
    const int member = set_of(program, call).member_of(early.rank);
    return call.allowed == kPeerGone || (call.from_any && member == call.sender);
  });
  for (size_t c = 0; c < program.calls.size(); ++c) {
    PlannedCall& call = program.calls[c];
    const int member = set_of(program, call).member_of(early.rank);
    if (member < 0) continue;
    if (call.message() && member != call.sender && member != call.receiver) continue;
    bool was_in = early.submitted.contains(static_cast<int64_t>(c));
    if (spares_the_left(call.request)) {
      foresee_change(call, early.rank, was_in);
      continue;
    }
    if (was_in || call.joins || call.ended_by >= 0) {
      call.allowed |= kPeerGone;
    } else {
      call.allowed = kPeerGone | (call.allowed & kStalled);
    }
    const bool refused = std::ranges::count(call.roles, Role::kRefuse) > 0;
    if (refused) call.allowed |= kRefused;  // where it is refused, and to those that wait
  }
  // There may be no room for a set: one whose removal fails stays, and one that was to be refused may be made.
  const bool crowded = std::ranges::any_of(program.calls, [](const PlannedCall& call) {
    if (call.removes >= 0) return (call.allowed & kPeerGone) != 0;
    const bool adds = call.request.signature.op == Op::kAddSet;
    return adds && (call.allowed & kDone) != 0 && (call.allowed & kInvalid) != 0;
  });
  for (PlannedCall& call : program.calls) {
    if (crowded && call.request.signature.op == Op::kAddSet) call.allowed |= kInvalid;
    // The others need not wait for the leaver's calls before they remove a set.
    const auto removes = [&](const PlannedCall& other) { return other.removes == call.set; };
    if (call.set > 0 && std::ranges::any_of(program.calls, removes)) call.allowed |= kInvalid;
  }
  bool uncertain = std::ranges::any_of(program.calls, [&](const PlannedCall& call) {
    if (call.ended_by < 0) return false;
    return (program.calls[static_cast<size_t>(call.ended_by)].allowed & kPeerGone) != 0;
  });
  // What the removal of a set should have ended waits until it is given up, and others for its ranks; when these
  // come, ranks that have given up waiting may have left.
  for (PlannedCall& call : program.calls) {
    if (uncertain || waits) call.allowed |= kStalled | kPeerGone;
    if (call.ended_by >= 0 && uncertain) call.allowed |= kDone | kPeerGone;
  }
  if (uncertain || waits) use_names_once(program);
}

// A set whose memory rank 0 lacks is not made. Elsewhere, and for messages, that ends the job.
void foresee_hunger(Program& program) {
  for (PlannedCall& call : program.calls) {
    call.allowed |= kInvalid;
    if (call.request.signature.op == Op::kAddSet) call.allowed |= kDone;
    call.calm = call.allowed;
  }
}

// Others give up what a rank comes too late for. Sets may be fewer or more than planned then.
void foresee_lateness(Program& program) {
  for (PlannedCall& call : program.calls) {
    if ((call.allowed & kStalled) != 0) call.allowed |= kDone;
    call.allowed |= kStalled;
    const Op op = call.request.signature.op;
    if (op == Op::kAddSet) call.allowed |= kDone | kInvalid;
    const auto removes = [&](const PlannedCall& other) { return other.removes == call.set; };
    if (call.set > 0 && std::ranges::any_of(program.calls, removes)) {
      call.allowed |= kDone | kInvalid;
    }
  }
  use_names_once(program);
}

void foresee_departure(Program& program) {
  Departure early = early_departure(program);
  if (early.rank < 0) return;
  if (early.kind == Kind::kLeave) return foresee_leave(program, early);
  for (PlannedCall& call : program.calls) call.allowed |= kPeerGone;
}

// The two ends of a link may hear of its end at different times: one rank gives up early what another is late for.
void foresee_cut(Program& program) {
  bool late = false;
  for (PlannedCall& call : program.calls) {
    if ((call.allowed & kStalled) == 0) continue;
    call.allowed |= kDone;
    late = true;
  }
  if (late) use_names_once(program);
}

void foresee_trouble(Program& program) {
  if (program.trouble == Trouble::kLittle) return;
  for (PlannedCall& call : program.calls) call.allowed |= kPeerGone;
  if (program.trouble == Trouble::kCut) foresee_cut(program);
  if (program.late()) foresee_lateness(program);
  if (program.trouble == Trouble::kHunger) foresee_hunger(program);
}

void foresee_skips(Program& program) {
  for (PlannedCall& call : program.calls) {
    for (int needed : {call.set, call.removes}) {
      int added_by = needed < 0 ? -1 : program.sets[static_cast<size_t>(needed)].added_by;
      bool lacks = added_by >= 0 && program.calls[static_cast<size_t>(added_by)].allowed != kDone;
      if (lacks) call.allowed |= kSkipped, call.calm |= kSkipped;
    }
  }
}

int32_t element(int call, int member, size_t part, int64_t i) {
  const auto of_part = static_cast<int64_t>(part) * 11;
  return static_cast<int32_t>((call * 31 + member * 17 + of_part + i * 7) % 1000) - 500;
}

int64_t rows_sent(int call, int member, Op op, int to) {
  return op == Op::kAllgather ? (call + member) % 4 : (call + member + 2 * to) % 3;
}

// The member's rows of a reducescatter: the first members get one more.
std::pair<int64_t, int64_t> kept_by(int member, int members, int64_t rows) {
  const int64_t each = rows / members, more = rows % members;
  const int64_t first = member * each + std::min<int64_t>(member, more);
  return {first, each + (member < more ? 1 : 0)};
}

const std::vector<int32_t>& reduced(const Program& program, int index, size_t part) {
  auto [known, fresh] = program.sums.try_emplace({index, part});
  std::vector<int32_t>& values = known->second;
  if (!fresh) return values;
  const PlannedCall& call = program.calls[static_cast<size_t>(index)];
  const Signature& s = call.request.part(part);
  std::vector<int> inputs;
  for (int m = 0; m < std::ssize(call.roles); ++m) {
    if (brings_input(program, call, m)) inputs.push_back(m);
  }
  for (int64_t i = 0; i < s.elements(); ++i) {
    int64_t sum = 0, most = INT32_MIN;
    for (int m : inputs) {
      const int64_t one = element(index, m, part, i);
      sum += one;
      most = std::max(most, one);
    }
    if (s.reduce_op == ReduceOp::kAverage) sum /= std::ssize(call.roles);
    values.push_back(static_cast<int32_t>(s.reduce_op == ReduceOp::kMax ? most : sum));
  }
  return values;
}

// The rows that a sender has for a receiver, if each gets others.
void add_rows(const Program& program, int index, int sender, int receiver,
              std::vector<int32_t>& into) {
  const std::vector<int64_t> splits = splits_of(program, index, sender);
  const auto sent = input_of(program, index, sender, 0);
  if (!sent) return;
  const int64_t row = program.calls[static_cast<size_t>(index)].request.signature.row_elements();
  int64_t first = 0;
  for (int to = 0; to < receiver; ++to) first += splits[static_cast<size_t>(to)];
  const int64_t count = splits[static_cast<size_t>(receiver)];
  into.insert(into.end(), sent->begin() + first * row, sent->begin() + (first + count) * row);
}

}  // namespace

void foresee(Program& program) {
  for (PlannedCall& call : program.calls) {
    if (call.allowed == 0) call.allowed = natural_end(program, call);
    // Who has heard of a refusal may leave before the others come.
    if (call.allowed == kRefused && !call.message()) call.allowed |= kPeerGone;
  }
  foresee_departure(program);
  for (PlannedCall& call : program.calls) call.calm = call.allowed;
  foresee_trouble(program);
  foresee_skips(program);
}

std::vector<int64_t> splits_of(const Program& program, int index, int member) {
  const PlannedCall& call = program.calls[static_cast<size_t>(index)];
  const Op op = call.request_of(member).signature.op;
  if (!traits_of(op).splits() || !brings_input(program, call, member)) return {};
  std::vector<int64_t> splits;
  for (int to = 0; to < std::ssize(call.roles); ++to)
    splits.push_back(rows_sent(index, member, op, to));
  return splits;
}

Dimensions shape_of(const Program& program, int index, int member, size_t part) {
  const PlannedCall& call = program.calls[static_cast<size_t>(index)];
  const Signature& s = call.request_of(member).part(part);
  Dimensions shape = s.shape;
  if (!s.traits().ragged()) return shape;
  const bool brings = brings_input(program, call, member);
  shape[0] = brings && s.op == Op::kAllgather ? rows_sent(index, member, s.op, 0) : 0;
  for (int64_t rows : splits_of(program, index, member)) shape[0] += rows;
  return shape;
}

std::optional<std::vector<int32_t>> input_of(const Program& program, int index, int member,
                                             size_t part) {
  const PlannedCall& call = program.calls[static_cast<size_t>(index)];
  if (!call.request_of(member).signature.traits().moves_bytes()) return std::nullopt;
  if (!brings_input(program, call, member)) return std::nullopt;
  int64_t count = 1;
  for (int64_t n : shape_of(program, index, member, part)) count *= n;
  std::vector<int32_t> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(element(index, member, part, i));
  return values;
}

std::optional<std::vector<int32_t>> result_of(const Program& program, int index, int member,
                                              size_t part) {
  const PlannedCall& call = program.calls[static_cast<size_t>(index)];
  if (!call.odd.empty()) return std::nullopt;  // it fails, or all mean something else
  const Signature& s = call.request.part(part);
  if (call.message()) {
    if (member != call.receiver) return std::nullopt;
    return input_of(program, index, call.sender, 0);
  }
  const auto& ranks = set_of(program, call).ranks;
  const bool target = !s.traits().to_root() || s.root == ranks[static_cast<size_t>(member)];
  if (!s.traits().moves_bytes() || !target) return std::nullopt;
  const int members = static_cast<int>(call.roles.size());
  if (s.traits().pattern == Pattern::kReduceToAll) return reduced(program, index, part);
  std::vector<int32_t> values;
  if (s.op == Op::kReducescatter) {
    const auto& all = reduced(program, index, part);
    const auto [first, count] = kept_by(member, members, s.rows());
    values.assign(all.begin() + first, all.begin() + first + count);
    return values;
  }
  for (int m = 0; m < members; ++m) {
    if (s.traits().splits()) {
      add_rows(program, index, m, member, values);
    } else if (const auto input = input_of(program, index, m, 0)) {
      values.insert(values.end(), input->begin(), input->end());
    }
  }
  return values;
}

}  // namespace farandole::simulation
