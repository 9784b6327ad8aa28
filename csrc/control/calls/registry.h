// SPDX-License-Identifier: Apache-2.0
// The coordinator's table of requests that have an id. Ids are small. The least recently used is evicted
// first, and an id is reused only after every rank has dropped it.
#pragma once

#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "control/calls/call.h"

namespace farandole {

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

}  // namespace farandole
