// SPDX-License-Identifier: Apache-2.0
// The coordinator's table of requests that have a number. Ids are small, used again only after every
// rank has dropped them, and evicted least recently used first.
#pragma once

#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "control/calls/call.h"

namespace farandole {

struct OpenBundle;

struct Definition {
  uint32_t id = 0;
  Request request;
  Call call;               // named requests: the one call in flight
  int uses = 0;            // calls in flight
  bool published = false;  // the ranks know it
  bool forgetting = false;
  OpenBundle* bundle = nullptr;  // that it is in now
  bool ends_bundle = false;      // somebody has waited for it in the middle of a bundle
  uint64_t completed = 0;        // when its last call was: the ones before have smaller numbers
  MemberMask forgotten;          // ranks that have dropped it, while forgetting
  std::list<uint32_t>::iterator recency;
};

class Registry {
 public:
  Registry(int world_size, size_t capacity) : world_size_(world_size), capacity_(capacity) {}

  // The definition behind an id; nullptr: never given out.
  Definition* at(uint32_t id);
  // The definition for a request: by (set, name) if named, whatever its signature now; by (set,
  // signature) if not. Made if there is none.
  Definition& intern(const Request& request);
  // Used again: moves to the young end.
  void touch(Definition& definition);
  // Ids to forget now: more than `capacity` are alive, and these are the oldest without a call. Looks
  // at a few only: call it again and again.
  std::vector<uint32_t> evict();
  // `rank` will not mean this id again; once nobody will, the id is free.
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
  std::vector<std::unique_ptr<Definition>> table_{1};  // by id; 0 stands for "no id"
  std::vector<uint32_t> free_;
  std::unordered_map<std::string, uint32_t> by_key_;
  std::list<uint32_t> recency_;  // oldest first; without those being forgotten
};

}  // namespace farandole
