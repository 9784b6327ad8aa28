// SPDX-License-Identifier: Apache-2.0
#include "control/coordinator/post_table.h"

#include <utility>

namespace farandole {

Posted::Posted(Rank its_rank, const Post& its_post, int64_t now_ns)
    : rank(its_rank),
      payload(its_post.contribution.payload.begin(), its_post.contribution.payload.end()),
      post(its_post),
      since_ns(now_ns) {
  post.contribution.payload = payload;
}

std::string text_of(const Posted& posted) {
  const Request& request = posted.request();
  std::string text = name_of(request.signature.op);
  if (!request.name.empty()) text += " '" + request.name + "'";
  text += " of rank " + std::to_string(posted.rank) + (posted.sends() ? " to " : " from ");
  text += request.peer == kAnyRank ? "any rank" : "rank " + std::to_string(request.peer);
  text += " with tag " + std::to_string(request.tag);
  if (request.set != kWorldSet) text += " in process set " + std::to_string(request.set);
  return text;
}

std::optional<Posted> PostTable::take_match(const Posted& posted) {
  auto best = lines_.end();
  auto consider = [&](Lines::iterator line) {
    if (line == lines_.end()) return;
    const bool earlier =
        best == lines_.end() || line->second.front().arrival < best->second.front().arrival;
    if (earlier) best = line;
  };
  if (posted.sends()) {
    consider(lines_.find(place_of(posted, End::kReceiver, posted.rank)));
    consider(lines_.find(place_of(posted, End::kReceiver, kAnyRank)));
  } else if (posted.request().peer != kAnyRank) {
    consider(lines_.find(place_of(posted, End::kSender, posted.request().peer)));
  } else {
    const auto last = lines_.lower_bound(place_of(posted, End::kReceiver, kAnyRank));
    auto line = lines_.lower_bound(place_of(posted, End::kSender, kAnyRank));
    for (; line != last; ++line) consider(line);
  }
  if (best == lines_.end()) return std::nullopt;
  Posted match = std::move(best->second.front());
  best->second.pop_front();
  if (best->second.empty()) lines_.erase(best);
  return match;
}

void PostTable::add(Posted posted) {
  posted.arrival = ++arrivals_;
  const End end = posted.sends() ? End::kSender : End::kReceiver;
  lines_[place_of(posted, end, posted.sender())].push_back(std::move(posted));
}

void PostTable::fail(const Posted& posted, const Failure& failure) {
  if (!posted.post.refusal) outbox_.write(Fail{posted.key(), failure});
}

void PostTable::fail_if(const std::function<Failure(const Posted&)>& fault) {
  for (auto& [place, line] : lines_) {
    std::erase_if(line, [&](const Posted& posted) {
      const Failure failure = fault(posted);
      if (failure) fail(posted, failure);
      return static_cast<bool>(failure);
    });
  }
  std::erase_if(lines_, [](const auto& entry) { return entry.second.empty(); });
}

}  // namespace farandole
