// SPDX-License-Identifier: Apache-2.0
#include "runtime/calls/reporter.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace farandole {

void ReportCombiner::open(const Predict& prediction,
                          const std::function<bool(uint32_t)>& under_way) {
  Opened& opened = predictions_[prediction.id];
  opened.id = prediction.id;
  opened.ids = prediction.ids;
  opened.seen.assign(prediction.ids.size(), false);
  for (size_t i = 0; i < prediction.ids.size(); ++i) {
    uint32_t id = prediction.ids[i];
    if (memberships_.size() <= id) memberships_.resize(id + 1);
    memberships_[id] = {&opened, static_cast<int32_t>(i)};
    if (!under_way(id)) continue;
    opened.state = State::kJoining;
    join(opened, static_cast<int32_t>(i));
  }
}

void ReportCombiner::join(Opened& prediction, int32_t position) {
  auto p = static_cast<size_t>(position);
  if (prediction.seen[p]) return;
  prediction.seen[p] = true;
  if (++prediction.seen_count == prediction.ids.size()) prediction.state = State::kActive;
}

void ReportCombiner::pass(Report&& report, int64_t handle, std::vector<Report>& out) {
  if (auto* ready = std::get_if<Ready>(&report)) return pass_ready(std::move(*ready), handle, out);
  // Reports that change the meaning of withheld ones must not overtake them.
  bool in_order = std::holds_alternative<Refuse>(report) || std::holds_alternative<Join>(report) ||
                  std::holds_alternative<Leave>(report);
  if (withheld_ > 0 && in_order) {
    for (auto& [id, prediction] : predictions_) {
      if (!prediction.withheld.empty()) give_up(prediction, false, out);
    }
  }
  out.push_back(std::move(report));
}

void ReportCombiner::pass_ready(Ready&& ready, int64_t handle, std::vector<Report>& out) {
  Membership membership = membership_of(ready.id);
  if (ready.id == 0 || !membership.prediction || membership.prediction->state == State::kGivenUp) {
    return void(out.emplace_back(std::move(ready)));
  }
  Opened& prediction = *membership.prediction;
  if (prediction.state == State::kJoining) {
    join(prediction, membership.position);
    return void(out.emplace_back(std::move(ready)));
  }
  if (!ready.contribution.has_input) {  // ReadyAll implies an input
    give_up(prediction, false, out);
    return void(out.emplace_back(std::move(ready)));
  }
  withhold(ready.id, handle, out);
}

bool ReportCombiner::withhold(uint32_t id, int64_t handle, std::vector<Report>& out) {
  const Membership membership = membership_of(id);
  if (!membership.prediction || membership.prediction->state != State::kActive) return false;
  Opened& prediction = *membership.prediction;
  prediction.withheld.push_back({membership.position, handle});
  ++withheld_;
  if (prediction.withheld.size() < prediction.ids.size()) return true;
  withheld_ -= static_cast<int>(prediction.withheld.size());
  prediction.withheld.clear();
  out.push_back(ReadyAll{prediction.id});
  return true;
}

void ReportCombiner::give_up(Opened& prediction, bool awaited, std::vector<Report>& out) {
  Withdraw withdraw{prediction.id, awaited, {}};
  for (const Withheld& call : prediction.withheld) withdraw.ready.push_back(call.position);
  withheld_ -= static_cast<int>(prediction.withheld.size());
  prediction.withheld.clear();
  prediction.state = State::kGivenUp;
  out.push_back(std::move(withdraw));
}

void ReportCombiner::await(std::span<const int64_t> handles, std::vector<Report>& out) {
  if (withheld_ == 0) return;
  for (auto& [id, prediction] : predictions_) {
    bool awaited = std::ranges::any_of(prediction.withheld, [&](const Withheld& call) {
      return std::ranges::find(handles, call.handle) != handles.end();
    });
    if (awaited) give_up(prediction, true, out);
  }
}

void ReportCombiner::close(uint32_t id, std::vector<Report>& out) {
  auto found = predictions_.find(id);
  if (found == predictions_.end()) return;
  Opened& prediction = found->second;
  if (prediction.state != State::kGivenUp) give_up(prediction, false, out);
  for (Membership& membership : memberships_) {
    if (membership.prediction == &prediction) membership = {};
  }
  predictions_.erase(found);
}

void ReportCombiner::clear() {
  predictions_.clear();
  memberships_.clear();
  withheld_ = 0;
}

const std::vector<uint32_t>& ReportCombiner::ids_of(uint32_t prediction) const {
  auto found = predictions_.find(prediction);
  if (found == predictions_.end()) {
    throw Error(ErrorCode::kInternal, "the log names a prediction that it has not made");
  }
  return found->second.ids;
}

void Reporter::pass(Report&& report, Handle handle) {
  report_combiner_.pass(std::move(report), handle, passed_);
  send_passed();
}

void Reporter::pass_known(uint32_t id, Contribution&& given, Handle handle) {
  if (given.has_input && report_combiner_.withhold(id, handle, passed_)) return send_passed();
  pass(Ready{id, {}, 0, std::move(given)}, handle);
}

void Reporter::send(Report report) {
  pass(std::move(report), 0);
  ring();
}

void Reporter::send_passed() {
  for (const Report& report : passed_) {
    if (expedited_ && says_ready(report)) expedited_ = false;
    encoded_.clear();
    encode(report, encoded_);
    channel_.report(encoded_);
  }
  if (!passed_.empty()) news_.store(true, std::memory_order_release);
  passed_.clear();
  withheld_.store(report_combiner_.withheld(), std::memory_order_release);
}

void Reporter::ring() {
  if (take_news()) channel_.wake_leader();
}

bool Reporter::flush() {
  if (!channel_.can_flush()) return false;
  channel_.flush();
  channel_.wake_leader();
  return true;
}

void Reporter::await(std::span<const Handle> handles) {
  report_combiner_.await(handles, passed_);
  send_passed();
  ring();
}

void Reporter::expedite() {
  if (!expedited_.exchange(true)) send(Expedite{});
}

void Reporter::open(const Predict& prediction, const std::function<bool(uint32_t)>& under_way) {
  report_combiner_.open(prediction, under_way);
}

void Reporter::close(const Dissolve& dissolve) {
  report_combiner_.close(dissolve.id, passed_);
  send_passed();
  ring();
}

void Reporter::clear() {
  report_combiner_.clear();
  withheld_ = 0;
}

}  // namespace farandole
