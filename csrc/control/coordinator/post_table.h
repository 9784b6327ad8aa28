// SPDX-License-Identifier: Apache-2.0
// The sends and receives that wait for their other end. Matches them: first in, first out for each process set,
// sender, receiver and tag. Pure, like the coordinator that uses it.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>

#include "control/coordinator/outbox.h"

namespace farandole {

// Both ranks are the world's.
struct Posted {
  Posted(Rank its_rank, const Post& its_post, int64_t now_ns);
  Posted(Posted&&) = default;
  Posted& operator=(Posted&&) = default;

  const Request& request() const { return post.request; }
  bool sends() const { return request().signature.traits().end == End::kSender; }
  CallKey key() const { return {request().set, {}, post.number, rank}; }
  Rank sender() const { return sends() ? rank : request().peer; }
  Rank receiver() const { return sends() ? request().peer : rank; }

  Rank rank;
  ByteString payload;
  Post post;  // its payload points into `payload`
  int64_t since_ns;
  uint64_t arrival = 0;  // in the order in which posts came
};
// "send 'x' of rank 0 to rank 1 with tag 7": how error messages name it.
std::string text_of(const Posted& posted);

class PostTable {
 public:
  explicit PostTable(Outbox& outbox) : outbox_(outbox) {}

  // Removes the post that this one meets; nullopt: none yet. A send meets the receive that was posted first,
  // from this rank or from any; a receive from any rank meets the send that came first.
  std::optional<Posted> take_match(const Posted& posted);
  void add(Posted posted);
  // Tells its rank, unless it has refused the call itself.
  void fail(const Posted& posted, const Failure& failure);
  // Fails and removes the posts for which `fault` returns a failure.
  void fail_if(const std::function<Failure(const Posted&)>& fault);

  template <class Visitor>
  void for_each(Visitor&& visit) const {
    for (const auto& [place, line] : lines_) {
      for (const Posted& posted : line) visit(posted);
    }
  }

 private:
  using Place = std::tuple<SetId, Rank, int64_t, End, Rank>;  // set, receiver, tag, end, sender
  using Lines = std::map<Place, std::deque<Posted>>;
  static Place place_of(const Posted& posted, End end, Rank sender) {
    return {posted.request().set, posted.receiver(), posted.request().tag, end, sender};
  }

  Outbox& outbox_;
  Lines lines_;  // none is empty
  uint64_t arrivals_ = 0;
};

}  // namespace farandole
