// SPDX-License-Identifier: Apache-2.0
#include "control/coordinator/publisher.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "kernels/kernels.h"

namespace farandole {
namespace {

constexpr size_t kMostNoticed = 64;  // notices per job; each may cause a flight dump

constexpr uint64_t kMaxOutstanding = 2;       // buckets of a lane; one moves and one waits
constexpr size_t kMaxTensors = 1024;          // per bucket, to limit the length of its log entry
constexpr size_t kMaxResultBytes = 16 << 10;  // largest result that is written to the log

// Reduces payloads in the order of the members, so that the result has the same bits as from the shared-memory backend.
ByteString reduce_payloads(const Signature& s, const Inputs& given, int members) {
  std::vector<const void*> inputs;
  inputs.reserve(static_cast<size_t>(members));
  for (int m = 0; m < members; ++m) {
    if (given.has(m)) inputs.push_back(given.payload(m).data());
  }
  ByteString result(s.bytes());
  kernels::Factors factors{s.prescale, s.postscale, divisor_of(s.reduce_op, members)};
  kernels::reduce(s.dtype, s.reduce_op, result.data(), inputs.data(),
                  static_cast<int>(inputs.size()), static_cast<size_t>(s.elements()), factors);
  return result;
}

ByteString in_member_order(const Inputs& given, int members) {
  ByteString whole;
  whole.reserve(given.payloads().size());
  for (int m = 0; m < members; ++m) {
    const ByteView piece = given.payload(m);
    whole.insert(whole.end(), piece.begin(), piece.end());
  }
  return whole;
}

// Returns the result of a tensor whose inputs came with the reports.
ByteString result_of(const Signature& s, const Inputs& given, const SetState& set) {
  switch (s.traits().pattern) {
    case Pattern::kReduceToAll: return reduce_payloads(s, given, set.members());
    case Pattern::kOneToAll: {
      const ByteView root = given.payload(set.member_of(s.root));
      return {root.begin(), root.end()};
    }
    case Pattern::kEachToAll: return in_member_order(given, set.members());
    default: return {};
  }
}

template <class T>
void append(std::vector<T>& all, std::vector<T> one) {
  if (all.empty()) {
    all = std::move(one);
  } else {
    all.insert(all.end(), one.begin(), one.end());
  }
}

// True if the log entry completes the call, because there is nothing to move or because the entry holds the result.
bool finishes_at_once(const Call& call) {
  if (!call.signature().traits().moves_bytes() || call.absent()) return true;
  return call.rode_along() && call.bytes() <= kMaxResultBytes;
}

PartInputs inputs_of(const Signature& s, const Inputs& given) {
  PartInputs inputs;
  if (!s.traits().from_root()) inputs.absent = given.absent_members();
  inputs.rows = given.rows();
  return inputs;
}

Item item_of(const Call& call) {
  const Request& request = call.request();
  Item item{call.id(), call.key().sequence, inputs_of(request.signature, call.inputs())};
  for (size_t i = 1; i < request.parts(); ++i) {
    item.more.push_back(inputs_of(request.part(i), call.inputs(i)));
  }
  if (std::ranges::all_of(item.more, &PartInputs::plain)) item.more.clear();
  return item;
}

void add(Run& run, const Call& call) {
  Item item = item_of(call);
  const bool plain = call.key().named() && item.inputs.plain() && item.more.empty();
  if (plain && !run.plain.full()) {
    run.plain.add(item.id);
  } else {
    run.items.push_back(std::move(item));
  }
}

}  // namespace

// Returns the first pair of members that are on the same host and use the same GPU.
std::optional<std::pair<Rank, Rank>> BackendPolicy::sharing(const SetState& set) const {
  for (auto a = set.ranks.begin(); a != set.ranks.end(); ++a) {
    for (auto b = set.ranks.begin(); b != a; ++b) {
      const UseGpu &one = gpus_.at(*a), &other = gpus_.at(*b);
      if (one.host == other.host && one.uuid == other.uuid) return std::pair{*b, *a};
    }
  }
  return std::nullopt;
}

BackendKind BackendPolicy::backend_of(const SetState& set) {
  for (Rank rank : set.ranks) {
    if (gpus_.contains(rank)) continue;
    throw Error(ErrorCode::kInvalidArgument,
                "rank " + std::to_string(rank) +
                    " joined before it used a GPU, so it can't take part in calls on GPUs; make a "
                    "call on a GPU on every rank before join()");
  }
  const std::string& backend = shared_.settings.gpu_backend;
  if (auto pair = sharing(set)) {
    if (shared_.settings.shared_gpu == "error") {
      throw Error(
          ErrorCode::kInvalidArgument,
          "ranks " + std::to_string(pair->first) + " and " + std::to_string(pair->second) +
              " both use " + gpus_.at(pair->first).name +
              " on one host. Give each rank its own GPU before its first GPU tensor: "
              "torch.cuda.set_device(farandole.local_rank()), "
              "cupy.cuda.Device(farandole.local_rank()).use(), or before JAX's first array "
              "jax.config.update('jax_cuda_visible_devices', str(farandole.local_rank())). To "
              "share the GPU, set FARANDOLE_SHARED_GPU=host (through host memory), or =nccl "
              "with NCCL_MULTI_RANK_GPU_ENABLE=1 or a different NCCL_HOSTID in each rank");
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
      throw Error(ErrorCode::kLibrary,
                  why + "; install one NCCL everywhere, or unset FARANDOLE_GPU_BACKEND=" + backend);
    }
    shared_.outbox.notice("tensors on GPUs travel through host memory: " + why +
                          "; install the same NCCL on all ranks (pip install nvidia-nccl-cu13)");
    return BackendKind::kStaged;
  }
  return BackendKind::kLibrary;
}

void BackendPolicy::open(const SetState& set) {
  shared_.outbox.write(OpenGpu{set.id, "", backend_of(set), set.ranks});
  open_.insert(set.id);
}

void BackendPolicy::connect(const SetState& set, Rank from, const OpenGpu& key) {
  if (!is_open(set.id) || from != set.ranks.front() || key.key.empty()) return;
  shared_.outbox.write(OpenGpu{set.id, key.key});
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
  if (noticed_.size() < kMostNoticed && noticed_.insert(std::move(pair)).second) {
    shared_.outbox.write(Notice{set.id, text});
  }
  return {};
}

Failure Publisher::fault_of_root(const SetState& set, const Call& call, size_t part) const {
  const Signature& s = call.request().part(part);
  int root = s.root < 0 || s.root >= shared_.settings.size ? -1 : set.member_of(s.root);
  if (root >= 0 && call.inputs(part).has(root)) return {};
  const std::string subject =
      text_of(call.key(), call.request(), part) + ": root rank " + std::to_string(s.root);
  if (root < 0) return {ErrorCode::kInvalidArgument, subject + " is not in the process set"};
  return {ErrorCode::kInvalidArgument,
          subject +
              " has no tensor because it has joined: choose a different root, or make the call "
              "after join(), which returns the last rank that joined"};
}

// Finds errors that can be detected only when all ranks have reported the call.
Failure Publisher::verdict(const SetState& set, Call& call) {
  if (auto failure = call.terms().failure(call.key(), set.ranks)) return *failure;
  for (size_t i = 0; i < call.request().parts(); ++i) {
    if (!call.request().part(i).traits().rooted()) continue;
    if (Failure fault = fault_of_root(set, call, i)) return fault;
  }
  return sites_.judge(set, call);
}

void Publisher::judge(SetState& set, Call& call) {
  if (!call.complete()) return;
  if (call.given_up()) return shared_.calls.retire(call);
  Failure failure = verdict(set, call);
  if (failure && by_members(call.request())) shared_.sets.bar(call.key().name, failure);
  if (failure) return shared_.calls.fail(call, failure);
  queue(set, call);
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

void Publisher::flush() {
  for (auto& [id, set] : shared_.sets.known()) flush(*set);
  std::erase_if(busy_pairs_, [&](SetId id) {
    SetState& pair = shared_.sets.at(id);
    flush(pair);
    return !pair.waits_for_lanes();
  });
}

void Publisher::flush(SetState& set) {
  for (Call* call : set.at_once) finish_at_once(set, *call);
  set.at_once.clear();
  while (!set.host.ready.empty() && may_run(set.host)) run_bucket(set, false);
  while (!set.gpu.ready.empty() && may_run(set.gpu)) {
    if (open_gpu(set)) run_bucket(set, true);
  }
  shared_.calls.drop_finished(set);
  end_join(set);
}

// Limits the buckets in flight. Once all ranks have left, all buckets may run, because Stop must be the last entry.
bool Publisher::may_run(const LaneQueue& lane) const {
  return shared_.sets.all_left() || lane.published - lane.done < kMaxOutstanding;
}

// Writes a Define if the request is new to the ranks or has changed. If ranks made an unnamed call at different sites,
// defines one request per site, so that every rank gets an id for its own request.
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
    Result result{set.id, call.id(), call.key().sequence, call.absent(), {}, {}};
    for (size_t i = 0; i < call.request().parts(); ++i) {
      append(result.rows, call.inputs(i).rows());
      if (result.absent) continue;
      append(result.payload, result_of(call.request().part(i), call.inputs(i), set));
    }
    define(call);
    shared_.outbox.write(std::move(result));
  }
  shared_.calls.retire(call);
}

void Publisher::add_set(const CallKey& key, std::span<const int64_t> wanted, bool alone) {
  Failure fault = shared_.sets.fault_of(wanted, alone);
  std::vector<Rank> ranks(wanted.begin(), wanted.end());
  if (alone) {
    const Failure formed{ErrorCode::kMismatch,
                         "'" + key.name + "' is already a process set of " + text_of_ranks(ranks)};
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

// Opens the set's GPU backend. If this fails, makes the next GPU call of the set fail, and returns false.
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

// Takes calls from the front of the lane until the bucket is full. CPU and GPU calls have separate lanes.
void Publisher::run_bucket(SetState& set, bool gpu) {
  LaneQueue& lane = gpu ? set.gpu : set.host;
  const size_t most = gpu ? shared_.settings.gpu_fusion_bytes : shared_.settings.fusion_bytes;
  Run run{set.id, lane.published + 1, {}, {}, gpu};
  size_t bytes = 0, tensors = 0;
  while (!lane.ready.empty()) {
    Call& call = *lane.ready.front();
    const bool full = bytes + call.bytes() > most || tensors >= kMaxTensors;
    if (tensors > 0 && full) break;
    bytes += call.bytes();
    tensors += call.request().parts();
    lane.ready.pop_front();
    define(call);
    add(run, call);
    shared_.calls.retire(call);
  }
  ++lane.published;
  shared_.outbox.write(std::move(run));
}

// Ends a join when all ranks have joined, when some ranks have left, or when the join was given up. Waits until the
// last call has been published, because ranks that return from join() may reuse the name of that call.
void Publisher::end_join(SetState& set) {
  const bool early = set.join_given_up || !set.left.empty();
  const bool over = set.joined.full() || (!set.joined.empty() && early);
  if (!over || set.waits_for_lanes()) return;
  // Ranks that have joined have made fewer unnamed calls than the others, so all ranks continue from this number.
  const uint64_t next = set.first_unnamed + set.unnamed.size();
  shared_.outbox.write(Joined{set.id, set.last_joined, next, std::exchange(set.join_failure, {})});
  set.joined.clear();
  set.join_given_up = false;
}

}  // namespace farandole
