// SPDX-License-Identifier: Apache-2.0
#include "control/prediction/bundler.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace farandole {

void Bundler::open(const Bundle& bundle, const std::function<bool(uint32_t)>& under_way) {
  Opened& opened = bundles_[bundle.id];
  opened.id = bundle.id;
  opened.ids = bundle.ids;
  opened.seen.assign(bundle.ids.size(), false);
  for (size_t i = 0; i < bundle.ids.size(); ++i) {
    uint32_t id = bundle.ids[i];
    if (places_.size() <= id) places_.resize(id + 1);
    places_[id] = {&opened, static_cast<int32_t>(i)};
    if (!under_way(id)) continue;
    opened.state = State::kJoining;
    join(opened, static_cast<int32_t>(i));
  }
}

void Bundler::join(Opened& bundle, int32_t position) {
  auto p = static_cast<size_t>(position);
  if (bundle.seen[p]) return;
  bundle.seen[p] = true;
  if (++bundle.seen_count == bundle.ids.size()) bundle.state = State::kActive;
}

void Bundler::pass(Report&& report, int64_t handle, std::vector<Report>& out) {
  if (auto* ready = std::get_if<Ready>(&report)) return pass_ready(std::move(*ready), handle, out);
  // What changes the meaning of a withheld report must not overtake it.
  bool in_order = std::holds_alternative<Refuse>(report) || std::holds_alternative<Join>(report) ||
                  std::holds_alternative<Leave>(report);
  if (withheld_ > 0 && in_order) {
    for (auto& [id, bundle] : bundles_) {
      if (!bundle.withheld.empty()) give_up(bundle, false, out);
    }
  }
  out.push_back(std::move(report));
}

void Bundler::pass_ready(Ready&& ready, int64_t handle, std::vector<Report>& out) {
  Place place = place_of(ready.id);
  if (ready.id == 0 || !place.bundle || place.bundle->state == State::kGivenUp) {
    return void(out.emplace_back(std::move(ready)));
  }
  Opened& bundle = *place.bundle;
  if (bundle.state == State::kJoining) {
    join(bundle, place.position);
    return void(out.emplace_back(std::move(ready)));
  }
  if (!ready.contribution.has_input) {  // not what the bundle stands for
    give_up(bundle, false, out);
    return void(out.emplace_back(std::move(ready)));
  }
  withhold(ready.id, handle, out);
}

bool Bundler::withhold(uint32_t id, int64_t handle, std::vector<Report>& out) {
  const Place place = place_of(id);
  if (!place.bundle || place.bundle->state != State::kActive) return false;
  Opened& bundle = *place.bundle;
  bundle.withheld.push_back({place.position, handle});
  ++withheld_;
  if (bundle.withheld.size() < bundle.ids.size()) return true;
  withheld_ -= static_cast<int>(bundle.withheld.size());
  bundle.withheld.clear();
  out.push_back(ReadyAll{bundle.id});
  return true;
}

void Bundler::give_up(Opened& bundle, bool awaited, std::vector<Report>& out) {
  Split split{bundle.id, awaited, {}};
  for (const Withheld& call : bundle.withheld) split.ready.push_back(call.position);
  withheld_ -= static_cast<int>(bundle.withheld.size());
  bundle.withheld.clear();
  bundle.state = State::kGivenUp;
  out.push_back(std::move(split));
}

void Bundler::await(std::span<const int64_t> handles, std::vector<Report>& out) {
  if (withheld_ == 0) return;
  for (auto& [id, bundle] : bundles_) {
    bool awaited = std::ranges::any_of(bundle.withheld, [&](const Withheld& call) {
      return std::ranges::find(handles, call.handle) != handles.end();
    });
    if (awaited) give_up(bundle, true, out);
  }
}

void Bundler::close(uint32_t id, std::vector<Report>& out) {
  auto found = bundles_.find(id);
  if (found == bundles_.end()) return;
  Opened& bundle = found->second;
  if (bundle.state != State::kGivenUp) give_up(bundle, false, out);
  for (Place& place : places_) {
    if (place.bundle == &bundle) place = {};
  }
  bundles_.erase(found);
}

void Bundler::clear() {
  bundles_.clear();
  places_.clear();
  withheld_ = 0;
}

const std::vector<uint32_t>& Bundler::ids_of(uint32_t bundle) const {
  auto found = bundles_.find(bundle);
  if (found == bundles_.end()) {
    throw Error(ErrorCode::kInternal, "the log names a bundle that it has not made");
  }
  return found->second.ids;
}

}  // namespace farandole
