// SPDX-License-Identifier: Apache-2.0
#include "control/coordinator/coordinator.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/error.h"
#include "base/overloaded.h"

namespace farandole {
namespace {

bool is_sound(const Signature& s) {
  int64_t bytes = static_cast<int64_t>(size_of(s.dtype));
  const bool ragged = s.traits().ragged();
  for (size_t i = 0; i < s.shape.size(); ++i) {
    bool any_length = ragged && i == 0 && s.shape[i] == -1;
    if (any_length || s.shape[i] == 0) continue;
    if (s.shape[i] < 0 || __builtin_mul_overflow(bytes, s.shape[i], &bytes)) return false;
  }
  return !ragged || (!s.shape.empty() && s.shape[0] == -1);
}

// Repeats the checks that every rank makes before it reports. A failure means a bug in the rank that reported.
void check_request(const Request& request) {
  const Signature& first = request.signature;
  const bool one = request.more.empty();
  bool sound = first.op != Op::kJoin && !first.traits().paired();
  sound = sound && (!request.no_tensors || (one && first.op == Op::kBarrier));
  if (first.traits().changes_sets) {
    sound = sound && request.set == kWorldSet && one && !(request.alone && request.name.empty());
  } else {
    for (size_t i = 0; i < request.parts(); ++i) {
      const Signature& s = request.part(i);
      const bool fits =
          s.traits().moves_bytes() && !s.traits().paired() && s.device == first.device;
      sound = sound && is_sound(s) && (one || fits);
    }
  }
  if (!sound) {
    throw Error(ErrorCode::kInternal,
                "a rank reported an impossible request under the name '" + request.name + "'");
  }
}

Ready plain_ready(const Definition* known, uint32_t id, uint64_t sequence) {
  Contribution plain;
  plain.has_input = true;
  const size_t more = known ? known->request.more.size() : 0;
  return {id, {}, sequence, plain, std::vector<Contribution>(more, plain)};
}

// Prefetches a definition. Definitions are seldom in a cache, so this saves a quarter of the time of a report.
void fetch(const Definition* definition) {
  constexpr size_t kLine = 64, kRead = 256;  // bytes
  const auto* at = reinterpret_cast<const std::byte*>(definition);
  for (size_t i = 0; at && i < kRead; i += kLine) __builtin_prefetch(at + i);
}

// True if a report comes too late because its set was removed (`set` is null) or because members of the set have left.
// A request that succeeds without the ranks that have left is never too late. A request that has the same name as such
// a request's open call is not too late either, because the two must be compared.
bool is_too_late(const SetState* set, const Request& request, Registry& registry) {
  if (!set) return true;
  if (set->left.empty() || spares_the_left(request)) return false;
  if (request.name.empty()) return true;
  const Call& call = registry.intern(request).call;
  return !call.is_open() || !spares_the_left(call.request());
}

// True if the rank has left. Its deferred report then no longer matters.
bool has_left(const SetState* set, Rank from) {
  return set && !set->left.empty() && set->left.contains(set->member_of(from));
}

// True if the call has counted joined members as arrived although they may still report it, because the first leave has
// ended the joins.
bool counts_joined(const SetState& set, const Request& request) {
  const bool first = set.left.count() == 1;
  return first && std::ranges::any_of(set.joined.members(), [&](int member) {
           return !by_members(request) || std::ranges::count(request.signature.shape, member) > 0;
         });
}

Failure too_late(const SetState* set, const CallKey& key, const Request& request) {
  if (!set) return removed(key.set);
  std::vector<Rank> gone;
  for (int m : set->left.members()) gone.push_back(set->rank_of(m));
  return {ErrorCode::kPeer, text_of_ranks(gone) + " finished normally and left, so " +
                                text_of(key, request) +
                                " can't complete; all ranks must make the same number of calls "
                                "(if the data is uneven, use join() or drop_last)"};
}

// Returns the failure of a rank that ended normally but has waited too long for others to leave. The text names them.
Failure blame_stayers(const std::vector<Rank>& stay, Rank from, const Leave& leave) {
  return {ErrorCode::kStall, "rank " + std::to_string(from) +
                                 " called shutdown() or exited, waited for " + text_of_ranks(stay) +
                                 " to leave, then gave up: " + leave.text +
                                 "; every rank must call shutdown() or exit"};
}

}  // namespace

void Coordinator::receive(Rank from, const Report& report, int64_t now_ns) {
  now_ns_ = now_ns;
  take(from, report, now_ns);
  take_due(now_ns);
}

// Takes the deferred reports that are due. Returns false if there are none.
bool Coordinator::take_due(int64_t now_ns) {
  const std::vector<Call::Later> due = shared_.calls.take_due();
  for (const auto& [from, report] : due) receive(from, decode_report(report), now_ns);
  return !due.empty();
}

void Coordinator::take(Rank from, const Report& report, int64_t now_ns) {
  const bool of_the_end = std::holds_alternative<Leave>(report) ||
                          std::holds_alternative<Lost>(report) ||
                          std::holds_alternative<Forgot>(report);
  if (broken_ && !of_the_end) return;
  if (const auto* most = std::get_if<Ready>(&report)) return ready(from, *most, now_ns);
  std::visit(Overloaded{
                 [](const Ready&) {},
                 [&](const Refuse& r) { refuse(from, r, now_ns); },
                 [&](const Join& r) { join(from, r, now_ns); },
                 [&](const Done& r) { done(from, r); },
                 [&](const Forgot& r) { shared_.calls.registry().forgot(r.id, from); },
                 [&](const Leave& r) { leave(from, r); },
                 [&](const StackReport& r) { stalls_.answered(from, r, now_ns); },
                 [&](const Inquire& r) {
                   if (r.number == 0) return shared_.outbox.write_something();
                   SetState* set = shared_.sets.of(r.key.set, from);
                   shared_.outbox.write(Answer{from, r.number, stalls_.explain(set, r, now_ns)});
                 },
                 [&](const Stuck& r) { stalls_.stands_still(from, r, now_ns); },
                 [&](const Lost& r) { lose(from, r.failure); },
                 [&](const ReadyMany& r) {
                   r.ids.for_each([&](uint32_t id) { ready(from, id, now_ns); });
                 },
                 [&](const UseGpu& r) { publisher_.backends().describe(from, r); },
                 [&](const OpenGpu& r) {
                   if (SetState* set = shared_.sets.of(r.set, from))
                     publisher_.backends().connect(*set, from, r);
                 },
                 [](const Expedite&) {},  // only leaders that forward reports need this report
                 [&](const Post& r) { messages_.post(from, r, now_ns); },
             },
             report);
}

int Coordinator::add_group(std::vector<Rank> ranks) {
  groups_.push_back({std::move(ranks), {}});
  return static_cast<int>(groups_.size()) - 1;
}

// Takes one report on behalf of all ranks of a group. Usually a few operations on the words of bit masks suffice.
void Coordinator::receive_all(int number, const Report& report, int64_t now_ns) {
  RankGroup& group = groups_.at(static_cast<size_t>(number));
  now_ns_ = now_ns;
  if (broken_) return;
  if (const auto* many = std::get_if<ReadyMany>(&report)) {
    many->ids.for_each([&](uint32_t id) {
      fetch(shared_.calls.registry().at(id + 1));
      ready(group, id, 0, now_ns);
    });
  } else if (const auto* one = std::get_if<Ready>(&report); one && one->plain()) {
    ready(group, one->id, one->sequence, now_ns);
  } else {
    throw Error(ErrorCode::kInternal,
                "a host sent one report for all its ranks, although they may differ in it");
  }
  take_due(now_ns);
}

void Coordinator::ready(RankGroup& group, uint32_t id, uint64_t sequence, int64_t now_ns) {
  Definition* known = shared_.calls.registry().at(id);
  if (!known) throw Error(ErrorCode::kInternal, "a host reported an unknown id");
  if (ready_at_once(group, *known, sequence, now_ns))
    return hear(group, known->request.set, now_ns);
  const SetState* set = shared_.sets.find(known->request.set);
  const std::vector<Rank> members = set ? set->ranks : numbers_below(shared_.settings.size);
  for (Rank rank : group.ranks) {
    if (index_in(members, rank) >= 0) ready(rank, plain_ready(known, id, sequence), now_ns);
  }
}

// Notes that the ranks of the group that belong to the set have made a call. Does this once per set and report.
void Coordinator::hear(RankGroup& group, SetId id, int64_t now_ns) {
  const std::pair now{id, now_ns};
  if (std::exchange(group.heard, now) == now) return;
  const SetState* set = shared_.sets.find(id);
  for (Rank rank : group.ranks) {
    if (!set || set->member_of(rank) >= 0) stalls_.heard(rank, now_ns);
  }
}

bool Coordinator::ready_at_once(RankGroup& group, Definition& known, uint64_t sequence,
                                int64_t now_ns) {
  SetState* set = shared_.sets.find(known.call.is_open() ? known.call.set() : known.request.set);
  if (!set || known.forgetting || !set->left.empty() || !set->joined.empty()) return false;
  const MemberSlice& members = group.slice_of(set->id, set->ranks);
  if (members.count == 0) return true;
  Call& call =
      known.call.is_open() ? known.call : find_call(*set, known, known.request, sequence, now_ns);
  if (call.id() != known.id || !call.arrive_plain(members)) return false;
  if (call.complete()) publisher_.judge(*set, call);
  return true;
}

// Takes a plain contribution on a short path if possible, otherwise as a Ready.
void Coordinator::ready(Rank from, uint32_t id, int64_t now_ns) {
  Definition* known = shared_.calls.registry().at(id);
  Call* call = known && !known->forgetting ? &known->call : nullptr;
  SetState* set = call && call->is_open() ? shared_.sets.find(call->set()) : nullptr;
  const int member = set && set->left.empty() ? set->member_of(from) : -1;
  if (member < 0 || !call->arrive_plain(member))
    return ready(from, plain_ready(known, id, 0), now_ns);
  arrived(*set, *call, from, now_ns);
}

void Coordinator::arrived(SetState& set, Call& call, Rank from, int64_t now_ns) {
  if (call.complete() && set.members() > 1) {
    shared_.outbox.came_last(from, now_ns - call.since_ns());
  }
  stalls_.heard(from, now_ns);
  judge(set, call, from);
}

void Coordinator::judge(SetState& set, Call& call, Rank from) {
  if (call.given_up()) shared_.outbox.fail_late(from, call.key(), call.given_up());
  if (call.complete()) publisher_.judge(set, call);
}

// Returns the call to which this request belongs. Opens the call at its first report.
Call& Coordinator::find_call(SetState& set, Definition& definition, const Request& request,
                             uint64_t sequence, int64_t now_ns) {
  Call& call = shared_.calls.slot(set, definition, request, sequence);
  if (call.is_open()) return call;
  shared_.calls.open(set, definition, call, request, sequence, now_ns);
  stalls_.expect_progress(now_ns, now_ns);
  return call;
}

void Coordinator::ready(Rank from, const Ready& ready, int64_t now_ns) {
  Definition* known = shared_.calls.registry().at(ready.id);
  if (ready.id != 0 && !known) throw Error(ErrorCode::kInternal, "a rank reported an unknown id");
  const Request& request = known ? known->request : ready.request;
  if (!known) check_request(request);
  SetState* set = shared_.sets.of(request.set, from);
  if (has_left(set, from)) return;
  if (is_too_late(set, request, shared_.calls.registry())) {
    CallKey key{request.set, request.name, ready.sequence};
    return shared_.outbox.fail_late(from, key, too_late(set, key, request));
  }
  if (const Failure* past = shared_.sets.barred(request)) {
    return shared_.outbox.fail_late(from, {request.set, request.name, 0}, *past);
  }
  // While an id is being forgotten, its name may already have a new id.
  bool current = known && !known->forgetting;
  Definition& definition = current ? *known : shared_.calls.registry().intern(request);
  Call& call = find_call(*set, definition, request, ready.sequence, now_ns);
  const int member = set->member_of(from);
  if (call.key().named() && call.heard(member)) return call.put_off(from, ready);
  bool same = current && !call.terms().redefines() && call.id() == ready.id;
  const bool alone = by_members(request) || by_members(call.request());
  if (alone && call.arrived().contains(member) && !call.terms().match(request, same)) {
    call.contradict(member, request);
  } else {
    call.arrive(member, request, same, ready);
  }
  arrived(*set, call, from, now_ns);
}

void Coordinator::refuse(Rank from, const Refuse& refuse, int64_t now_ns) {
  SetState* set = shared_.sets.of(refuse.key.set, from);
  Request request{refuse.key.set, refuse.key.name, {}};
  request.signature.op = refuse.op;
  request.signature.shape = refuse.members;
  request.alone = !refuse.members.empty();
  if (has_left(set, from)) return;
  if (is_too_late(set, request, shared_.calls.registry())) {
    return shared_.outbox.fail_late(from, refuse.key, too_late(set, refuse.key, request));
  }
  if (const Failure* past = shared_.sets.barred(request)) {
    return shared_.outbox.fail_late(from, refuse.key, *past);
  }
  Definition& definition = shared_.calls.registry().intern(request);
  Call& call = find_call(*set, definition, request, refuse.key.sequence, now_ns);
  const int member = set->member_of(from);
  if (call.key().named() && call.heard(member)) return call.put_off(from, refuse);
  call.refuse(member, refuse.failure);
  judge(*set, call, from);
}

void Coordinator::done(Rank from, const Done& done) {
  SetState* set = shared_.sets.of(done.set, from);
  if (!set) return;
  LaneQueue& lane = done.gpu ? set->gpu : set->host;
  if (from != set->ranks.front() || done.bucket > lane.published) {
    throw Error(ErrorCode::kInternal, "a rank reported an impossible end of a bucket");
  }
  lane.done = std::max(lane.done, done.bucket);
  stalls_.bucket_ended(now_ns_);
}

void Coordinator::join(Rank from, const Join& join, int64_t now_ns) {
  SetState* set = shared_.sets.of(join.set, from);
  if (!set) return;
  for (Call* call : shared_.calls.all(*set)) {
    if (call->puts_off(from)) return call->put_off(from, join);  // joins after its deferred call
  }
  int member = set->member_of(from);
  if (set->joined.empty()) set->joined_since_ns = now_ns;
  bool again = !set->joined.insert(member);
  // Once a rank has left, joins end early. A rank may then join again before it has
  // read the log entry that ends its first join.
  if (again && set->left.empty()) throw Error(ErrorCode::kInternal, "a rank joined twice");
  set->last_joined = from;
  stalls_.heard(from, now_ns);
  stalls_.expect_progress(now_ns, now_ns);
  if (!set->join_failure) set->join_failure = join.failure;
  for (Call* call : shared_.calls.all(*set)) {
    const bool ends_at_once = !set->left.empty() && spares_the_left(call->request());
    if (ends_at_once || call->arrived().contains(member)) continue;
    call->arrive_joined(member);
    publisher_.judge(*set, *call);
  }
  messages_.join(*set);
}

void Coordinator::leave(Rank from, const Leave& leave) {
  if (leave.failed && leave.waited) {
    return lose(from, blame_stayers(shared_.sets.staying(), from, leave));
  }
  if (leave.failed) {
    return lose(from, {ErrorCode::kPeer, "rank " + std::to_string(from) + " left: " + leave.text});
  }
  shared_.sets.leave(from);
  for (auto& [id, set] : shared_.sets) {
    const int member = set->member_of(from);
    if (broken_ || member < 0) continue;
    set->left.insert(member);
    for (Call* call : shared_.calls.waiting(*set)) {
      if (spares_the_left(call->request()) && !counts_joined(*set, call->request())) {
        if (call->arrived().contains(member)) continue;
        call->arrive_joined(member);
        publisher_.judge(*set, *call);
        continue;
      }
      const Failure& refused = call->terms().refused();
      shared_.calls.give_up(*set, *call,
                            refused ? refused : too_late(set.get(), call->key(), call->request()));
    }
    messages_.leave(*set, from);
  }
}

void Coordinator::lose(Rank rank, Failure failure) {
  shared_.sets.leave(rank);
  fail_job(std::move(failure));
}

void Coordinator::fail_job(Failure failure) {
  if (broken_ || stopped_) return;
  broken_ = true;
  shared_.outbox.write(Abort{std::move(failure)});
}

void Coordinator::publish(std::vector<Entry>& log) {
  for (bool more = true; more && !broken_; more = take_due(now_ns_)) {
    publisher_.flush();
  }
  for (uint32_t id : shared_.calls.registry().evict()) shared_.outbox.write(Forget{id});
  if (!stopped_ && shared_.sets.all_left()) {
    stopped_ = true;
    shared_.outbox.write(Stop{});
  }
  shared_.outbox.take(log);
}

int64_t Coordinator::next_tick() const {
  if (broken_ || stopped_) return std::numeric_limits<int64_t>::max();
  return stalls_.next_tick();
}

void Coordinator::tick(int64_t now_ns) {
  if (now_ns < next_tick() || broken_ || stopped_) return;
  now_ns_ = now_ns;
  if (Failure failure = stalls_.tick(now_ns)) fail_job(std::move(failure));
  take_due(now_ns);
}

}  // namespace farandole
