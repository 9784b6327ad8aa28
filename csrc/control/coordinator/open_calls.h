// SPDX-License-Identifier: Apache-2.0
// The coordinator's calls in flight, from their first report until they are published or fail.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "control/calls/call.h"
#include "control/coordinator/set_table.h"

namespace farandole {

// A send or a receive that waits for its other end. Ranks are world ranks.
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
  Post post;  // the payload of the post points into `payload`
  int64_t since_ns;
  uint64_t arrival = 0;  // counts posts in the order of their arrival
};
// The name of a post, as shown in error messages: "send 'x' of rank 0 to rank 1 with tag 7".
std::string text_of(const Posted& posted);

// Matches sends with receives, first in, first out for each combination of set, sender, receiver and tag.
class PostTable {
 public:
  explicit PostTable(Outbox& outbox) : outbox_(outbox) {}

  // Removes and returns the earliest post that matches this post, or returns nullopt if there is none.
  std::optional<Posted> take_match(const Posted& posted);
  void add(Posted posted);
  // Reports a failure to the rank that made the post, unless that rank has refused the call.
  void fail(const Posted& posted, const Failure& failure);
  // Removes the posts for which `fault` returns a failure, and makes them fail with it.
  void fail_if(const std::function<Failure(const Posted&)>& fault);

  template <class Visitor>
  void for_each(Visitor&& visit) const {
    for (const auto& [key, queue] : queues_) {
      for (const Posted& posted : queue) visit(posted);
    }
  }

 private:
  using QueueKey = std::tuple<SetId, Rank, int64_t, End, Rank>;  // set, receiver, tag, end, sender
  using Queues = std::map<QueueKey, std::deque<Posted>>;
  static QueueKey key_of(const Posted& posted, End end, Rank sender) {
    return {posted.request().set, posted.receiver(), posted.request().tag, end, sender};
  }

  Outbox& outbox_;
  Queues queues_;  // empty queues are removed
  uint64_t arrivals_ = 0;
};

// A request that has an id. If there are too many definitions, the coordinator evicts the least recently used of them.
// The id of an evicted definition is free once all ranks have dropped it.
struct Definition {
  uint32_t id = 0;
  int uses = 0;            // number of calls in flight
  bool published = false;  // true once the definition's Define is in the log
  bool forgetting = false;
  // The call in flight of a named request. It is stored here because most reports need no other data.
  Call call;
  Request request;
  MemberMask forgotten;  // while the id is being forgotten, the ranks that have dropped it
  std::list<uint32_t>::iterator recency;
};

class Registry {
 public:
  Registry(int world_size, size_t capacity) : world_size_(world_size), capacity_(capacity) {}

  // Returns nullptr if the id is not in use.
  Definition* at(uint32_t id);
  // Finds or creates the definition for a set and a name or, if the request has no name, for a set and a signature.
  Definition& intern(const Request& request);
  void touch(Definition& definition);
  // If more than `capacity` ids are in use, returns the oldest without an open call. Checks few ids, so call it often.
  std::vector<uint32_t> evict();
  // Call this when `rank` has dropped this id. The id is free once all ranks have dropped it.
  void forgot(uint32_t id, Rank rank);

  template <class Visitor>
  void for_each(Visitor&& visit) {
    for (auto& definition : table_) {
      if (definition) visit(*definition);
    }
  }
  size_t size() const { return recency_.size(); }

 private:
  static std::string key_of(const Request& request);

  int world_size_;
  size_t capacity_;
  std::vector<std::unique_ptr<Definition>> table_{1};  // by id; index 0 means "no id"
  std::vector<uint32_t> free_;
  std::unordered_map<std::string, uint32_t> by_key_;
  std::list<uint32_t> recency_;  // ids, oldest first, except those that are being forgotten
};

class OpenCalls {
 public:
  OpenCalls(int world_size, size_t capacity, Outbox& outbox)
      : outbox_(outbox), registry_(world_size, capacity) {}

  Registry& registry() { return registry_; }
  const Registry& registry() const { return registry_; }

  // Returns the slot for a request's call. The call may not be open yet.
  Call& slot(SetState& set, Definition& definition, const Request& request, uint64_t sequence) {
    return request.name.empty() ? unnamed_slot(set, sequence) : definition.call;
  }
  // Opens a call at its first report. Counts as arrived the members for which the call need not wait.
  void open(SetState& set, Definition& definition, Call& call, const Request& request,
            uint64_t sequence, int64_t now_ns);
  // Ends a call. An unnamed call stays in its slot until drop_finished().
  void retire(Call& call);
  void fail(Call& call, const Failure& failure);
  // Makes a call fail before all members have reported. A named call can then start again. An unnamed call keeps its
  // place in the order until all members have reported it.
  void give_up(SetState& set, Call& call, const Failure& failure);
  void drop_finished(SetState& set);
  // Returns the reports that were deferred until the end of a call, if that call has now ended.
  std::vector<Call::Later> take_due() { return std::exchange(due_, {}); }

  std::vector<Call*> all(SetState& set);
  std::vector<Call*> waiting(SetState& set);  // only calls that wait for a report

 private:
  static Call& unnamed_slot(SetState& set, uint64_t sequence);

  Outbox& outbox_;
  Registry registry_;
  std::vector<Call::Later> due_;
};

struct Shared {
  explicit Shared(CoordinatorSettings its_settings)
      : settings(std::move(its_settings)),
        sets(settings.size, settings.max_sets),
        calls(settings.size, settings.capacity, outbox),
        posts(outbox) {}

  const CoordinatorSettings settings;
  Outbox outbox;
  SetTable sets;
  OpenCalls calls;
  PostTable posts;
};

}  // namespace farandole
