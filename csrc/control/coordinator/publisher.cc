// SPDX-License-Identifier: Apache-2.0
#include "control/coordinator/publisher.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "kernels/kernels.h"

namespace farandole {
namespace {

constexpr size_t kMostTold = 64;  // each may write a flight dump; nobody reads more

constexpr uint64_t kMaxOutstanding = 2;       // buckets of one set: one moves, one waits
constexpr size_t kMaxItems = 1024;            // of one bucket; bounds the size of its log entry
constexpr size_t kMaxResultBytes = 16 << 10;  // carried by the log

// Sums payloads in member order, so that the result has the same bits as the shared-memory backend's.
ByteString reduce_payloads(const Call& call, int members) {
  const Signature& s = call.signature();
  std::vector<const void*> inputs;
  inputs.reserve(static_cast<size_t>(members));
  for (int m = 0; m < members; ++m) {
    if (call.inputs().has(m)) inputs.push_back(call.inputs().payload(m).data());
  }
  ByteString result(s.bytes());
  kernels::Factors factors{s.prescale, s.postscale, divisor_of(s.reduce_op, members)};
  kernels::reduce(s.dtype, s.reduce_op, result.data(), inputs.data(),
                  static_cast<int>(inputs.size()), static_cast<size_t>(s.elements()), factors);
  return result;
}

ByteString in_member_order(const Call& call, int members) {
  ByteString whole;
  whole.reserve(call.inputs().payloads().size());
  for (int m = 0; m < members; ++m) {
    const ByteView piece = call.inputs().payload(m);
    whole.insert(whole.end(), piece.begin(), piece.end());
  }
  return whole;
}

// The log entry completes the call: there is nothing to move, or the entry carries it.
bool finishes_at_once(const Call& call) {
  if (!call.signature().traits().moves_bytes() || call.inputs().absent()) return true;
  return call.inputs().rode_along() && call.bytes() <= kMaxResultBytes;
}

Item item_of(const Call& call) {
  const Signature& s = call.signature();
  std::vector<int32_t> absent;
  if (!s.traits().from_root()) absent = call.inputs().absent_members();
  return {call.id(), call.key().sequence, std::move(absent), call.inputs().rows()};
}

void add(Run& run, const Call& call) {
  Item item = item_of(call);
  const bool plain = call.key().named() && item.absent.empty() && item.rows.empty();
  if (plain && !run.plain.full()) {
    run.plain.add(item.id);
  } else {
    run.items.push_back(std::move(item));
  }
}

}  // namespace

// The first two members of one host that use the same GPU.
std::optional<std::pair<Rank, Rank>> BackendPolicy::sharing(const SetState& set) const {
  for (auto a = set.ranks.begin(); a != set.ranks.end(); ++a) {
    for (auto b = set.ranks.begin(); b != a; ++b) {
      const UseGpu &one = gpus_.at(*a), &other = gpus_.at(*b);
      if (one.host == other.host && one.uuid == other.uuid) return std::pair{*b, *a};
    }
  }
  return std::nullopt;
}

// Throws the reason if the set can't use GPUs together.
BackendKind BackendPolicy::backend_of(const SetState& set) {
  for (Rank rank : set.ranks) {
    if (gpus_.contains(rank)) continue;
    throw Error(ErrorCode::kInvalidArgument,
                "rank " + std::to_string(rank) +
                    " has joined before it used a GPU, so it can't take part in calls on GPUs");
  }
  const std::string& backend = shared_.settings.gpu_backend;
  if (auto pair = sharing(set)) {
    if (shared_.settings.shared_gpu == "error") {
      throw Error(
          ErrorCode::kInvalidArgument,
          "ranks " + std::to_string(pair->first) + " and " + std::to_string(pair->second) +
              " both use " + gpus_.at(pair->first).name +
              " of one host. Give each rank its own before its first GPU tensor: "
              "torch.cuda.set_device(farandole.local_rank()), "
              "cupy.cuda.Device(farandole.local_rank()).use(), or before JAX's first array "
              "jax.config.update('jax_cuda_visible_devices', str(farandole.local_rank())). If they "
              "are meant to share it, set "
              "FARANDOLE_SHARED_GPU=host (through host memory), or nccl if NCCL is told to "
              "allow it (NCCL_MULTI_RANK_GPU_ENABLE=1, or a different NCCL_HOSTID in each rank)");
    }
    if (shared_.settings.shared_gpu == "host") return BackendKind::kStaged;
  }
  if (backend == "host") return BackendKind::kStaged;
  const std::string& library = gpus_.at(set.ranks.front()).library;
  for (Rank rank : set.ranks) {
    const std::string& its = gpus_.at(rank).library;
    if (its == library && !its.empty()) continue;
    const std::string why =
        its.empty() || library.empty()
            ? "no usable NCCL on rank " + std::to_string(its.empty() ? rank : set.ranks.front())
            : library + " on rank " + std::to_string(set.ranks.front()) + " and " + its +
                  " on rank " + std::to_string(rank);
    if (backend != "auto") {
      throw Error(ErrorCode::kLibrary, why + "; FARANDOLE_GPU_BACKEND is " + backend);
    }
    shared_.outbox.notice("tensors on GPUs travel through host memory: " + why +
                          " (pip install nvidia-nccl-cu13, the same version everywhere)");
    return BackendKind::kStaged;
  }
  return BackendKind::kLibrary;
}

void BackendPolicy::open(const SetState& set) {
  shared_.outbox.write(SetUp{set.id, "", backend_of(set), set.ranks});
  open_.insert(set.id);
}

void BackendPolicy::connect(const SetState& set, Rank from, const SetUp& key) {
  if (!is_open(set.id) || from != set.ranks.front() || key.key.empty()) return;
  shared_.outbox.write(SetUp{set.id, key.key});
}

Failure CallSites::judge(const SetState& set, const Call& call) {
  if (call.terms().agreed()) return {};
  const RanksByValue sites = call.terms().sites(set.ranks);
  if (sites.empty()) return {};
  const std::string text =
      text_of(call.key(), call.request()) +
      " matches calls from different lines: " + text_of(sites) +
      ". Calls without a name match by their order, so the result may mix different tensors. Make "
      "such calls in the same order on all ranks, or give each a name";
  if (shared_.settings.check_sites) return {ErrorCode::kMismatch, text};
  std::set<std::string> lines;
  for (const auto& [site, ranks] : sites) lines.insert(site);
  std::string pair;
  for (const std::string& line : lines) pair += line + "\n";
  if (told_.size() < kMostTold && told_.insert(std::move(pair)).second) {
    shared_.outbox.write(Notice{set.id, text});
  }
  return {};
}

// Errors that show only when all have reported.
Failure Publisher::verdict(const SetState& set, Call& call) {
  if (auto failure = call.terms().failure(call.key(), set.ranks)) return *failure;
  const Signature& s = call.signature();
  if (s.traits().rooted()) {
    int root = s.root < 0 || s.root >= shared_.settings.size ? -1 : set.member_of(s.root);
    const std::string subject =
        text_of(call.key(), call.request()) + ": root rank " + std::to_string(s.root);
    if (root < 0) {
      return {ErrorCode::kInvalidArgument, subject + " is not in the process set"};
    }
    if (!call.inputs().has(root)) {
      return {ErrorCode::kInvalidArgument,
              subject +
                  " brings no tensor, because it has joined: choose a root that has not, or "
                  "make the call after join(), which returns the rank that joined last"};
    }
  }
  return sites_.judge(set, call);
}

void Publisher::judge(SetState& set, Call& call) {
  if (call.given_up()) shared_.outbox.fail_late(call.key(), call.given_up());
  if (!set.broken.empty() && end_broken(set, call)) return;
  if (!call.complete()) return;
  if (call.given_up()) return shared_.calls.retire(call);
  Failure failure = verdict(set, call);
  if (failure && by_members(call.request())) shared_.sets.bar(call.key().name, failure);
  if (failure && break_group(set, call, failure)) return;
  auto groups = call.terms().groups();
  if (!groups.empty()) return judge_group(set, call, groups, failure);
  if (failure) return shared_.calls.fail(call, failure);
  queue(set, call);
}

// The first failure fails the group's complete calls at once, and the others when they are complete. Only the
// call that leads it fails last: users wait for that one first, and may make the same call again when it fails.
void Publisher::judge_group(SetState& set, Call& call, const std::vector<Terms::Group>& groups,
                            const Failure& failure) {
  const Request& terms = call.request();
  const bool leads = groups.size() == 1 && terms.group == groups[0].name &&
                     !follows(terms, call.key().index_in_group());
  if (failure && !leads) shared_.calls.fail(call, failure);
  for (const auto& [name, size] : groups) {  // one, unless the members disagree
    CallGroup& group = set.groups[name];
    bool whole = ++group.complete >= size;
    if (failure && !group.failure) group.failure = failure;
    if (leads) group.leader = &call;
    if (leads || !failure) group.calls.push_back(&call);
    if (group.failure) {
      fail_group(group, whole);
    } else if (whole) {
      for (Call* member : group.calls) queue(set, *member);
    }
    if (whole) set.groups.erase(name);
  }
}

void Publisher::fail_group(CallGroup& group, bool whole) {
  for (Call* member : std::exchange(group.calls, {})) {
    if (member != group.leader) shared_.calls.fail(*member, group.failure);
  }
  if (whole && group.leader) shared_.calls.fail(*group.leader, group.failure);
}

bool Publisher::break_group(SetState& set, Call& call, const Failure& failure) {
  const std::vector<Terms::Led> led = call.terms().led(call.key().index_in_group(), call.arrived());
  if (led.empty() || !call.terms().uneven()) return false;
  BrokenGroup& group = set.broken.emplace_back(BrokenGroup{&call, {}, 0, failure});
  for (const auto& [name, followers, members] : led) {
    group.names.push_back(name);
    group.reports += static_cast<size_t>(followers) * static_cast<size_t>(members);
    set.groups.erase(name);
  }
  end_broken(set, call);
  return true;
}

// Waits for all announced reports of the group: a late report after its end would begin a new call.
bool Publisher::end_broken(SetState& set, const Call& call) {
  const std::string& name = call.request().group;
  auto group = std::ranges::find_if(set.broken, [&](const BrokenGroup& broken) {
    return broken.first == &call || std::ranges::count(broken.names, name) > 0;
  });
  if (group == set.broken.end()) return false;
  std::vector<Call*> calls;
  size_t reports = 0;
  for (Call* other : shared_.calls.all(set)) {
    const bool one_of_it = std::ranges::count(group->names, other->request().group) > 0 &&
                           follows(other->request(), other->key().index_in_group());
    if (!one_of_it) continue;
    calls.push_back(other);
    reports += other->terms().outspoken(other->arrived()).size();
  }
  if (reports < group->reports) return true;
  calls.push_back(group->first);
  for (Call* failed : calls) shared_.calls.end(set, *failed, group->failure);
  set.broken.erase(group);
  return true;
}

void Publisher::queue(SetState& set, Call& call) {
  call.queue();
  if (finishes_at_once(call)) {
    set.at_once.push_back(&call);
  } else if (call.signature().device != kCpuDevice) {
    set.gpu.ready.push_back(&call);
  } else {
    set.host.ready.push_back(&call);
  }
  if (is_pair(set.id)) busy_pairs_.insert(set.id);
}

bool Publisher::flush(int64_t now_ns) {
  bool moves = false;
  for (auto& [id, set] : shared_.sets.known()) moves |= flush(*set, now_ns);
  std::erase_if(busy_pairs_, [&](SetId id) {
    SetState& pair = shared_.sets.at(id);
    moves |= flush(pair, now_ns);
    return !pair.waits_for_lanes();
  });
  return moves;
}

bool Publisher::flush(SetState& set, int64_t now_ns) {
  bool moves = false;
  for (Call* call : set.at_once) finish_at_once(set, *call);
  set.at_once.clear();
  while (!set.host.ready.empty() && may_run(set.host)) moves |= run_bucket(set, false, now_ns);
  while (!set.gpu.ready.empty() && may_run(set.gpu)) {
    if (open_gpu(set)) run_bucket(set, true, now_ns);
  }
  shared_.calls.drop_finished(set);
  end_join(set);
  return moves;
}

// Keeps few buckets in flight. Once all ranks have left, the rest goes out, because Stop must be last.
bool Publisher::may_run(const LaneQueue& lane) const {
  return shared_.sets.all_left() || lane.published - lane.done < kMaxOutstanding;
}

// Writes a Define when ranks don't know the request yet, or when it has changed. Unnamed requests of other sites are
// defined too, because ranks that always come later would never get an id for theirs.
void Publisher::define(Call& call) {
  Definition& definition = *shared_.calls.registry().at(call.id());
  if (call.terms().redefines()) definition.request = call.request();
  if (call.terms().redefines()) definition.published = false;
  define(definition);
  for (const Request& other : call.terms().of_other_sites()) {
    Definition& known = shared_.calls.registry().intern(other);
    shared_.calls.registry().touch(known);
    define(known);
  }
}

void Publisher::define(Definition& definition) {
  if (std::exchange(definition.published, true)) return;
  shared_.outbox.write(Define{definition.id, definition.request});
}

void Publisher::finish_at_once(SetState& set, Call& call) {
  const Signature& s = call.signature();
  if (s.op == Op::kAddSet) {
    add_set(call.key(), s.shape, by_members(call.request()));
  } else if (s.op == Op::kRemoveSet) {
    remove_set(call.key(), s.root);
  } else {
    Result result{
        set.id, call.id(), call.key().sequence, call.inputs().absent(), call.inputs().rows(), {}};
    if (!call.inputs().absent()) result.payload = payload_of(set, call);
    define(call);
    shared_.outbox.write(std::move(result));
  }
  shared_.calls.retire(call);
}

// The result of a call whose inputs came with the reports.
ByteString Publisher::payload_of(const SetState& set, const Call& call) const {
  switch (call.signature().traits().pattern) {
    case Pattern::kReduceToAll: return reduce_payloads(call, set.members());
    case Pattern::kOneToAll: {
      const ByteView root = call.inputs().payload(set.member_of(call.signature().root));
      return {root.begin(), root.end()};
    }
    case Pattern::kEachToAll: return in_member_order(call, set.members());
    default: return {};
  }
}

void Publisher::add_set(const CallKey& key, std::span<const int64_t> wanted, bool alone) {
  Failure fault = shared_.sets.fault_of(wanted, alone);
  std::vector<Rank> ranks(wanted.begin(), wanted.end());
  if (alone) {
    const Failure formed{ErrorCode::kMismatch, "'" + key.name + "' is a process set of " +
                                                   text_of_ranks(ranks) + " already"};
    shared_.sets.bar(key.name, fault ? fault : formed);
  }
  if (fault) return shared_.outbox.write(Fail{key, std::move(fault)});
  const SetId id = shared_.sets.open(ranks);
  shared_.outbox.write(OpenSet{id, std::move(ranks), key});
}

void Publisher::remove_set(const CallKey& key, SetId id) {
  SetState* set = id <= kWorldSet ? nullptr : shared_.sets.find(id);
  const std::string name = "process set " + std::to_string(id);
  if (!set) {
    Failure failure{ErrorCode::kInvalidArgument, name + " can't be removed"};
    return shared_.outbox.write(Fail{key, std::move(failure)});
  }
  Failure failure{ErrorCode::kInvalidArgument, name + " was removed while calls were under way"};
  for (Call* call : shared_.calls.all(*set)) shared_.calls.fail(*call, failure);
  shared_.posts.fail_if(
      [&](const Posted& posted) { return posted.request().set == id ? failure : Failure{}; });
  backends_.close(id);
  shared_.sets.erase(id);
  shared_.outbox.write(CloseSet{id, key});
}

// False: the set's next GPU call has failed instead.
bool Publisher::open_gpu(SetState& set) {
  if (backends_.is_open(set.id)) return true;
  try {
    backends_.open(set);
    return true;
  } catch (const Error& error) {
    Call& call = *set.gpu.ready.front();
    set.gpu.ready.pop_front();
    shared_.calls.fail(call, {error.code(), error.what()});
    return false;
  }
}

// Takes calls from the front until the bucket is full. Calls of a group stay together. Host
// and GPU memory have separate lanes and limits, so neither waits for the other.
bool Publisher::run_bucket(SetState& set, bool gpu, int64_t now_ns) {
  LaneQueue& lane = gpu ? set.gpu : set.host;
  const size_t most = gpu ? shared_.settings.gpu_fusion_bytes : shared_.settings.fusion_bytes;
  Run run{set.id, lane.published + 1, {}, {}, gpu};
  size_t bytes = 0;
  std::string group;
  while (!lane.ready.empty()) {
    Call& call = *lane.ready.front();
    const std::string& its_group = call.request().group;
    const size_t items = run.items.size() + run.plain.size();
    bool bound = !its_group.empty() && its_group == group;
    bool full = bytes + call.bytes() > most || items >= kMaxItems;
    if (items > 0 && full && !bound) break;
    group = its_group;
    bytes += call.bytes();
    lane.ready.pop_front();
    define(call);
    add(run, call);
    shared_.calls.retire(call);
  }
  const bool begins = !lane.moving();
  if (begins) lane.moving_since_ns = now_ns;
  ++lane.published;
  shared_.outbox.write(std::move(run));
  return begins;
}

// Ends a join when all have joined or some can't any more; but only after the last call is published, because
// ranks that return from join() may use its name anew.
void Publisher::end_join(SetState& set) {
  bool over = set.joined.full() || (!set.joined.empty() && !set.left.empty());
  if (!over || set.waits_for_lanes()) return;
  // Joined ranks have made fewer unnamed calls, so all ranks continue with this number.
  const uint64_t next = set.first_unnamed + set.unnamed.size();
  shared_.outbox.write(Joined{set.id, set.last_joined, next, std::exchange(set.join_failure, {})});
  set.joined.clear();
}

}  // namespace farandole
