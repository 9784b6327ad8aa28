// SPDX-License-Identifier: Apache-2.0
// The calls in flight, by name or by their order in a set. A call begins with its first report and ends when
// it is published or fails.
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

// The sends and receives that wait for their other end. Matches them: first in, first out for each process set,
// sender, receiver and tag. Pure, like the coordinator that uses it.

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
  Queues queues_;  // none is empty
  uint64_t arrivals_ = 0;
};

// The coordinator's table of requests that have an id. Ids are small. The least recently used is evicted
// first, and an id is reused only after every rank has dropped it.
struct Definition {
  uint32_t id = 0;
  int uses = 0;            // calls in flight
  bool published = false;  // its Define is in the log
  bool forgetting = false;
  Call
      call;  // named requests only: the call in flight. Here, because most reports need no more than these
  Request request;
  MemberMask forgotten;  // ranks that have dropped it; used while forgetting
  std::list<uint32_t>::iterator recency;
};

class Registry {
 public:
  Registry(int world_size, size_t capacity) : world_size_(world_size), capacity_(capacity) {}

  // The definition of an id; nullptr: not in use.
  Definition* at(uint32_t id);
  // The definition of a request: found by (set, name) if named, whatever its signature is now; by (set,
  // signature) if not. Created if missing.
  Definition& intern(const Request& request);
  // Marks it as most recently used.
  void touch(Definition& definition);
  // Ids to forget now, while more than `capacity` are in use: the oldest without a call. Examines only a few
  // per call, so it has to be called repeatedly.
  std::vector<uint32_t> evict();
  // `rank` has dropped this id. Once all have, the id is free.
  void forgot(uint32_t id, Rank rank);

  // For stall checks.
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
  std::vector<std::unique_ptr<Definition>> table_{1};  // by id; 0 means "no id"
  std::vector<uint32_t> free_;
  std::unordered_map<std::string, uint32_t> by_key_;
  std::list<uint32_t> recency_;  // oldest first; those being forgotten excluded
};

class OpenCalls {
 public:
  OpenCalls(int world_size, size_t capacity, Outbox& outbox)
      : outbox_(outbox), registry_(world_size, capacity) {}

  Registry& registry() { return registry_; }
  const Registry& registry() const { return registry_; }

  // The call slot of a request; it may not be open yet.
  Call& slot(SetState& set, Definition& definition, const Request& request, uint64_t sequence) {
    return request.name.empty() ? unnamed_slot(set, sequence) : definition.call;
  }
  // Opens a call at its first report, with the joined members already counted.
  void open(SetState& set, Definition& definition, Call& call, const Request& request,
            uint64_t sequence, int64_t now_ns);
  // Ends a call. Unnamed ones stay in their slot until drop_finished().
  void retire(Call& call);
  void fail(Call& call, const Failure& failure);
  // Fails a call that not all have reported. A named call can begin anew; an unnamed one keeps its place in
  // the order until the others have reported it.
  void give_up(SetState& set, Call& call, const Failure& failure);
  void drop_finished(SetState& set);
  // Reports that waited for the end of a call, and may be taken now.
  std::vector<Call::Later> take_due() { return std::exchange(due_, {}); }

  // Both lists are in no particular order.
  std::vector<Call*> all(SetState& set);
  std::vector<Call*> waiting(SetState& set);  // for the report of some rank

 private:
  static Call& unnamed_slot(SetState& set, uint64_t sequence);

  Outbox& outbox_;
  Registry registry_;
  std::vector<Call::Later> due_;
};

// What the parts of the coordinator share.
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
