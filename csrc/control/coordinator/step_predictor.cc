// SPDX-License-Identifier: Apache-2.0
#include "control/coordinator/step_predictor.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace farandole {
namespace {

// A rank may withhold what another waits for by means that nobody here sees: not for longer than this.
constexpr int64_t kPatience = 500'000'000;
// While the first calls of a step are reduced, the next are still submitted.
constexpr size_t kMostCalls = 256;  // of one bundle

int64_t patience_of(const CoordinatorSettings& settings) {
  int64_t patience = kPatience;
  for (int64_t limit : {settings.stall_warn_ns, settings.stall_abort_ns}) {
    if (limit > 0) patience = std::min(patience, limit / 2);
  }
  return patience;
}

Ready plain(uint32_t id) {
  Ready ready;
  ready.id = id;
  ready.contribution.has_input = true;
  return ready;
}

// What a rank may leave out of its report, where all have an input.
bool regular(const Request& request) {
  return !request.name.empty() && request.group.empty() && request.signature.traits().predicted &&
         request.signature.device == kCpuDevice;
}

// A few inputs that ride along with their reports are done in one round; as a bundle they take two, but
// only one report.
bool pays(size_t calls, size_t bytes) {
  constexpr size_t kFewest = 2, kFewestTiny = 8;
  return calls >= (bytes <= calls * kTinyBytes ? kFewestTiny : kFewest);
}

}  // namespace

StepPredictor::StepPredictor(const CoordinatorSettings& settings, SetTable& sets,
                             Registry& registry, Outbox& outbox, Receive receive)
    : settings_(settings),
      sets_(sets),
      registry_(registry),
      outbox_(outbox),
      receive_(std::move(receive)),
      patience_ns_(patience_of(settings)) {}

OpenBundle& StepPredictor::at(uint32_t id) {
  auto found = bundles_.find(id);
  if (found == bundles_.end()) {
    throw Error(ErrorCode::kInternal, "a rank reports an unknown bundle");
  }
  return *found->second;
}

void StepPredictor::begin_round(OpenBundle& bundle, int64_t now_ns) {
  if (!bundle.idle()) return;
  bundle.since_ns = now_ns;
  next_tick_ns_ = std::min(next_tick_ns_, now_ns + patience_ns_);
}

bool StepPredictor::ready(Rank from, const ReadyAll& ready, int64_t now_ns) {
  OpenBundle& bundle = at(ready.bundle);
  SetState* set = sets_.of(bundle.set, from);
  if (!set || bundle.closing || bundle.open > 0) {
    for (uint32_t id : bundle.ids) receive_(from, plain(id), now_ns);
    return false;
  }
  begin_round(bundle, now_ns);
  if (!bundle.arrived.insert(set->member_of(from))) {
    throw Error(ErrorCode::kInternal, "a rank reported a bundle twice before it was done");
  }
  if (bundle.arrived.full() && set->members() > 1) {
    outbox_.came_last(from, now_ns - bundle.since_ns);
  }
  complete_round(*set, bundle);
  return true;
}

bool StepPredictor::ready(RankGroup& group, const ReadyAll& ready, int64_t now_ns) {
  OpenBundle& bundle = at(ready.bundle);
  SetState* set = sets_.find(bundle.set);
  if (!set || bundle.closing || bundle.open > 0) return false;
  const MemberSlice& members = group.slice_of(set->id, set->ranks);
  if (members.count == 0) return true;
  begin_round(bundle, now_ns);
  if (!bundle.arrived.insert_all(members.first_word, members.words, members.count)) return false;
  complete_round(*set, bundle);
  return true;
}

void StepPredictor::complete_round(SetState& set, OpenBundle& bundle) {
  if (!bundle.arrived.full()) return;
  bundle.queued = true;
  set.host.ready.push_back(&bundle);
}

void StepPredictor::split(Rank from, const Split& split, int64_t now_ns) {
  OpenBundle& bundle = at(split.bundle);
  SetState* set = sets_.of(bundle.set, from);
  if (!bundle.split.insert(from)) {
    throw Error(ErrorCode::kInternal, "a rank gave up a bundle twice");
  }
  for (int32_t position : split.ready) {
    if (position < 0 || std::cmp_greater_equal(position, bundle.ids.size())) {
      throw Error(ErrorCode::kInternal, "a rank reports what is not in the bundle");
    }
  }
  if (split.awaited && split.ready.empty()) {
    throw Error(ErrorCode::kInternal, "a rank waits for a part of a bundle that it has not begun");
  }
  const bool first = !bundle.closing;
  if (first) unbundle(bundle, now_ns);
  if (split.awaited && set && first) {
    const auto last = static_cast<size_t>(split.ready.back());
    const bool known = std::exchange(registry_.at(bundle.ids[last])->ends_bundle, true);
    if (known) set->cycle.mistrust();
  }
  for (int32_t position : split.ready) {
    receive_(from, plain(bundle.ids[static_cast<size_t>(position)]), now_ns);
  }
  if (bundle.split.count() < bundle.members) return;
  for (uint32_t id : bundle.ids) --registry_.at(id)->uses;
  bundles_.erase(bundle.id);
}

// Who has reported the bundle in this round has reported its calls.
void StepPredictor::spill(OpenBundle& bundle, int64_t now_ns) {
  if (bundle.arrived.empty()) return;
  const SetState& set = sets_.at(bundle.set);
  auto members = bundle.arrived.members();
  bundle.end_round();
  for (uint32_t id : bundle.ids) {
    for (int32_t m : members) receive_(set.rank_of(m), plain(id), now_ns);
  }
}

void StepPredictor::take_apart(Definition& definition, int64_t now_ns) {
  OpenBundle& bundle = *definition.bundle;
  begin_round(bundle, now_ns);
  spill(bundle, now_ns);
  if (!definition.call.is_open()) ++bundle.open;
}

void StepPredictor::unbundle(OpenBundle& bundle, int64_t now_ns) {
  if (std::exchange(bundle.closing, true)) return;
  for (uint32_t id : bundle.ids) registry_.at(id)->bundle = nullptr;
  outbox_.write(Unbundle{bundle.id});
  SetState& set = sets_.at(bundle.set);
  std::erase_if(set.host.ready, [&](const auto& waiting) {
    auto* queued = std::get_if<OpenBundle*>(&waiting);
    return queued && *queued == &bundle;
  });
  set.cycle.restart();
  spill(bundle, now_ns);
}

void StepPredictor::unbundle_all(const SetState& set, int64_t now_ns) {
  for (auto& [id, bundle] : bundles_) {
    if (bundle->set == set.id) unbundle(*bundle, now_ns);
  }
}

void StepPredictor::tick(int64_t now_ns) {
  for (auto& [id, bundle] : bundles_) {
    if (bundle->waits() && now_ns >= bundle->since_ns + patience_ns_) unbundle(*bundle, now_ns);
  }
  next_tick_ns_ = std::numeric_limits<int64_t>::max();
  for (auto& [id, bundle] : bundles_) {
    if (bundle->waits()) next_tick_ns_ = std::min(next_tick_ns_, bundle->since_ns + patience_ns_);
  }
}

void StepPredictor::saw(SetState& set, const Call& call) {
  if (settings_.bundles <= 0 || registry_.at(call.id())->bundle) return;
  const bool tiny = call.signature().bytes() <= kTinyBytes;
  if (!regular(call.request()) || !call.inputs().absent_members().empty()) return;
  if (settings_.bundle_tiny || !tiny) set.cycle.saw(call.id());
}

// Once a step has come often enough. A rank knows from its place in the log which round of a bundle it is
// in, because all its calls have been published equally often: what has come once more already is bundled
// apart. Half of the ids stay free to be evicted.
void StepPredictor::predict(SetState& set, int64_t now_ns) {
  if (settings_.bundles <= 0 || !set.cycle.settled()) return;
  const std::vector<uint32_t> next = set.cycle.next(), begun = set.cycle.begun();
  set.cycle.restart();
  if (!set.joined.empty() || !set.left.empty()) return;
  size_t bytes = 0, pinned = next.size() + begun.size();
  for (auto& [id, bundle] : bundles_) pinned += bundle->ids.size();
  if (pinned > settings_.capacity / 2) return;
  for (const auto& ids : {next, begun}) {
    for (uint32_t id : ids) {
      if (!may_be_bundled(set, id)) return;
      bytes += registry_.at(id)->request.signature.bytes();
    }
  }
  auto parts = static_cast<size_t>(settings_.bundles);
  size_t target = std::max(settings_.bundle_bytes, (bytes + parts - 1) / parts);
  target = std::min(target, settings_.fusion_bytes);
  open_bundles(set, next, target, now_ns);
  open_bundles(set, begun, target, now_ns);
}

// Calls of the next round may be under way, as if they had been reported after the bundle was made.
bool StepPredictor::may_be_bundled(const SetState& set, uint32_t id) {
  const Definition* definition = registry_.at(id);
  return definition && !definition->forgetting && !definition->bundle && definition->published &&
         definition->request.set == set.id && regular(definition->request) &&
         (!definition->call.is_open() || definition->call.plain());
}

// In the order in which they became ready, which is not that of the log: who can do without the lane
// overtakes who waits for it, and what is ready early must not be bundled with what comes last.
void StepPredictor::open_bundles(SetState& set, std::vector<uint32_t> ids, size_t target,
                                 int64_t now_ns) {
  std::ranges::sort(ids, {}, [this](uint32_t id) { return registry_.at(id)->completed; });
  std::vector<uint32_t> next;
  size_t bytes = 0;
  for (uint32_t id : ids) {
    const Definition& definition = *registry_.at(id);
    next.push_back(id);
    bytes += definition.request.signature.bytes();
    const bool full = bytes >= target || next.size() >= kMostCalls;
    if (!full && !definition.ends_bundle && id != ids.back()) continue;
    open_bundle(set, std::exchange(next, {}), std::exchange(bytes, 0), now_ns);
  }
}

void StepPredictor::open_bundle(SetState& set, std::vector<uint32_t> ids, size_t bytes,
                                int64_t now_ns) {
  if (!pays(ids.size(), bytes)) return;
  auto bundle = std::make_unique<OpenBundle>();
  bundle->id = next_++;
  bundle->set = set.id;
  bundle->bytes = bytes;
  bundle->members = set.members();
  bundle->arrived = MemberMask(set.members());
  bundle->split = MemberMask(settings_.size);
  for (uint32_t id : ids) {
    Definition& definition = *registry_.at(id);
    definition.bundle = bundle.get();
    ++definition.uses;
    if (!definition.call.is_open()) continue;
    begin_round(*bundle, now_ns);
    ++bundle->open;
  }
  outbox_.write(Bundle{bundle->id, set.id, ids});
  bundle->ids = std::move(ids);
  bundles_[bundle->id] = std::move(bundle);
}

}  // namespace farandole
