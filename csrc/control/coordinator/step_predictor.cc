// SPDX-License-Identifier: Apache-2.0
#include "control/coordinator/step_predictor.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace farandole {
namespace {

// Longest wait for a round: a withheld report may block another rank in a way not visible here.
constexpr int64_t kPatience = 500'000'000;
// Bounded so that the first calls of a step are reduced while later ones are still submitted.
constexpr size_t kMostCalls = 256;  // of one prediction

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

// Whether a call can be reported without its request: if all members have an input, nothing else varies.
bool regular(const Request& request) {
  return !request.name.empty() && request.group.empty() && request.signature.traits().predicted &&
         request.signature.device == kCpuDevice;
}

// Whether a prediction saves time: inputs that come with their reports take one round trip, a prediction two
// but only one report.
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

PredictedGroup& StepPredictor::at(uint32_t id) {
  auto found = predictions_.find(id);
  if (found == predictions_.end()) {
    throw Error(ErrorCode::kInternal, "a rank reports an unknown prediction");
  }
  return *found->second;
}

void StepPredictor::begin_round(PredictedGroup& prediction, int64_t now_ns) {
  if (!prediction.idle()) return;
  prediction.since_ns = now_ns;
  next_tick_ns_ = std::min(next_tick_ns_, now_ns + patience_ns_);
}

bool StepPredictor::ready(Rank from, const ReadyAll& ready, int64_t now_ns) {
  PredictedGroup& prediction = at(ready.prediction);
  SetState* set = sets_.of(prediction.set, from);
  if (!set || prediction.closing || prediction.open > 0) {
    for (uint32_t id : prediction.ids) receive_(from, plain(id), now_ns);
    return false;
  }
  begin_round(prediction, now_ns);
  if (!prediction.arrived.insert(set->member_of(from))) {
    throw Error(ErrorCode::kInternal, "a rank reported a prediction twice before it was done");
  }
  if (prediction.arrived.full() && set->members() > 1) {
    outbox_.came_last(from, now_ns - prediction.since_ns);
  }
  complete_round(*set, prediction);
  return true;
}

bool StepPredictor::ready(RankGroup& group, const ReadyAll& ready, int64_t now_ns) {
  PredictedGroup& prediction = at(ready.prediction);
  SetState* set = sets_.find(prediction.set);
  if (!set || prediction.closing || prediction.open > 0) return false;
  const MemberSlice& members = group.slice_of(set->id, set->ranks);
  if (members.count == 0) return true;
  begin_round(prediction, now_ns);
  if (!prediction.arrived.insert_all(members.first_word, members.words, members.count))
    return false;
  complete_round(*set, prediction);
  return true;
}

void StepPredictor::complete_round(SetState& set, PredictedGroup& prediction) {
  if (!prediction.arrived.full()) return;
  prediction.queued = true;
  set.host.ready.push_back(&prediction);
}

void StepPredictor::withdraw(Rank from, const Withdraw& withdraw, int64_t now_ns) {
  PredictedGroup& prediction = at(withdraw.prediction);
  SetState* set = sets_.of(prediction.set, from);
  if (!prediction.split.insert(from)) {
    throw Error(ErrorCode::kInternal, "a rank gave up a prediction twice");
  }
  for (int32_t position : withdraw.ready) {
    if (position < 0 || std::cmp_greater_equal(position, prediction.ids.size())) {
      throw Error(ErrorCode::kInternal, "a rank reports what is not in the prediction");
    }
  }
  if (withdraw.awaited && withdraw.ready.empty()) {
    throw Error(ErrorCode::kInternal,
                "a rank waits for a part of a prediction that it has not begun");
  }
  const bool first = !prediction.closing;
  if (first) dissolve(prediction, now_ns);
  if (withdraw.awaited && set && first) {
    const auto last = static_cast<size_t>(withdraw.ready.back());
    const bool known = std::exchange(registry_.at(prediction.ids[last])->ends_prediction, true);
    if (known) set->cycle.mistrust();
  }
  for (int32_t position : withdraw.ready) {
    receive_(from, plain(prediction.ids[static_cast<size_t>(position)]), now_ns);
  }
  if (prediction.split.count() < prediction.members) return;
  for (uint32_t id : prediction.ids) --registry_.at(id)->uses;
  predictions_.erase(prediction.id);
}

// Turns reports of the prediction in this round into reports of its calls.
void StepPredictor::spill(PredictedGroup& prediction, int64_t now_ns) {
  if (prediction.arrived.empty()) return;
  const SetState& set = sets_.at(prediction.set);
  auto members = prediction.arrived.members();
  prediction.end_round();
  for (uint32_t id : prediction.ids) {
    for (int32_t m : members) receive_(set.rank_of(m), plain(id), now_ns);
  }
}

void StepPredictor::take_apart(Definition& definition, int64_t now_ns) {
  PredictedGroup& prediction = *definition.prediction;
  begin_round(prediction, now_ns);
  spill(prediction, now_ns);
  if (!definition.call.is_open()) ++prediction.open;
}

void StepPredictor::dissolve(PredictedGroup& prediction, int64_t now_ns) {
  if (std::exchange(prediction.closing, true)) return;
  for (uint32_t id : prediction.ids) registry_.at(id)->prediction = nullptr;
  outbox_.write(Dissolve{prediction.id});
  SetState& set = sets_.at(prediction.set);
  std::erase_if(set.host.ready, [&](const auto& waiting) {
    auto* queued = std::get_if<PredictedGroup*>(&waiting);
    return queued && *queued == &prediction;
  });
  set.cycle.restart();
  spill(prediction, now_ns);
}

void StepPredictor::dissolve_all(const SetState& set, int64_t now_ns) {
  for (auto& [id, prediction] : predictions_) {
    if (prediction->set == set.id) dissolve(*prediction, now_ns);
  }
}

void StepPredictor::tick(int64_t now_ns) {
  for (auto& [id, prediction] : predictions_) {
    if (prediction->waits() && now_ns >= prediction->since_ns + patience_ns_)
      dissolve(*prediction, now_ns);
  }
  next_tick_ns_ = std::numeric_limits<int64_t>::max();
  for (auto& [id, prediction] : predictions_) {
    if (prediction->waits())
      next_tick_ns_ = std::min(next_tick_ns_, prediction->since_ns + patience_ns_);
  }
}

void StepPredictor::saw(SetState& set, const Call& call) {
  if (settings_.predictions <= 0 || registry_.at(call.id())->prediction) return;
  const bool tiny = call.signature().bytes() <= kTinyBytes;
  if (!regular(call.request()) || !call.inputs().absent_members().empty()) return;
  if (settings_.prediction_tiny || !tiny) set.cycle.saw(call.id());
}

// Called once a step has repeated often enough. A rank tells a prediction's round from its place in the log,
// because all calls of a prediction are published equally often; so calls already published in the current
// step get predictions of their own. Half of the ids remain evictable.
void StepPredictor::predict(SetState& set, int64_t now_ns) {
  if (settings_.predictions <= 0 || !set.cycle.settled()) return;
  const std::vector<uint32_t> next = set.cycle.next(), begun = set.cycle.begun();
  set.cycle.restart();
  if (!set.joined.empty() || !set.left.empty()) return;
  size_t bytes = 0, pinned = next.size() + begun.size();
  for (auto& [id, prediction] : predictions_) pinned += prediction->ids.size();
  if (pinned > settings_.capacity / 2) return;
  for (const auto& ids : {next, begun}) {
    for (uint32_t id : ids) {
      if (!may_be_predicted(set, id)) return;
      bytes += registry_.at(id)->request.signature.bytes();
    }
  }
  auto parts = static_cast<size_t>(settings_.predictions);
  size_t target = std::max(settings_.prediction_bytes, (bytes + parts - 1) / parts);
  target = std::min(target, settings_.fusion_bytes);
  predicted_groups(set, next, target, now_ns);
  predicted_groups(set, begun, target, now_ns);
}

// An open call is fine if its reports so far are plain: they count as made after the prediction.
bool StepPredictor::may_be_predicted(const SetState& set, uint32_t id) {
  const Definition* definition = registry_.at(id);
  return definition && !definition->forgetting && !definition->prediction &&
         definition->published && definition->request.set == set.id &&
         regular(definition->request) && (!definition->call.is_open() || definition->call.plain());
}

// Groups calls in the order in which they became ready. The log's order differs, because calls that need no
// lane overtake others; and early calls must not be grouped with the last ones.
void StepPredictor::predicted_groups(SetState& set, std::vector<uint32_t> ids, size_t target,
                                     int64_t now_ns) {
  std::ranges::sort(ids, {}, [this](uint32_t id) { return registry_.at(id)->completed; });
  std::vector<uint32_t> next;
  size_t bytes = 0;
  for (uint32_t id : ids) {
    const Definition& definition = *registry_.at(id);
    next.push_back(id);
    bytes += definition.request.signature.bytes();
    const bool full = bytes >= target || next.size() >= kMostCalls;
    if (!full && !definition.ends_prediction && id != ids.back()) continue;
    predicted_group(set, std::exchange(next, {}), std::exchange(bytes, 0), now_ns);
  }
}

void StepPredictor::predicted_group(SetState& set, std::vector<uint32_t> ids, size_t bytes,
                                    int64_t now_ns) {
  if (!pays(ids.size(), bytes)) return;
  auto prediction = std::make_unique<PredictedGroup>();
  prediction->id = next_++;
  prediction->set = set.id;
  prediction->bytes = bytes;
  prediction->members = set.members();
  prediction->arrived = MemberMask(set.members());
  prediction->split = MemberMask(settings_.size);
  for (uint32_t id : ids) {
    Definition& definition = *registry_.at(id);
    definition.prediction = prediction.get();
    ++definition.uses;
    if (!definition.call.is_open()) continue;
    begin_round(*prediction, now_ns);
    ++prediction->open;
  }
  outbox_.write(Predict{prediction->id, set.id, ids});
  prediction->ids = std::move(ids);
  predictions_[prediction->id] = std::move(prediction);
}

}  // namespace farandole
