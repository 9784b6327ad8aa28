// SPDX-License-Identifier: Apache-2.0
#include "control/calls/registry.h"

namespace farandole {

std::string Registry::key_of(const Request& request) {
  if (!request.name.empty()) return std::to_string(request.set) + "/" + request.name;
  ByteString bytes;
  Define define{0, request};
  encode(Entry(define), bytes);
  return "=" + std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

Definition* Registry::at(uint32_t id) { return id < table_.size() ? table_[id].get() : nullptr; }

Definition& Registry::intern(const Request& request) {
  auto [found, fresh] = by_key_.try_emplace(key_of(request), 0);
  if (!fresh) return *table_[found->second];
  if (free_.empty()) {
    free_.push_back(static_cast<uint32_t>(table_.size()));
    table_.emplace_back();
  }
  uint32_t id = free_.back();
  free_.pop_back();
  found->second = id;
  auto definition = std::make_unique<Definition>();
  definition->id = id;
  definition->request = request;
  definition->recency = recency_.insert(recency_.end(), id);
  table_[id] = std::move(definition);
  return *table_[id];
}

void Registry::touch(Definition& definition) {
  recency_.splice(recency_.end(), recency_, definition.recency);
}

std::vector<uint32_t> Registry::evict() {
  std::vector<uint32_t> victims;
  if (recency_.size() <= capacity_) return victims;
  for (size_t looks = 2 * (recency_.size() - capacity_); looks > 0; --looks) {
    if (recency_.size() <= capacity_) break;
    Definition& definition = *table_[recency_.front()];
    if (definition.uses > 0) {
      touch(definition);
      continue;
    }
    recency_.pop_front();
    by_key_.erase(key_of(definition.request));
    if (definition.published) {
      definition.forgetting = true;
      definition.forgotten = MemberMask(world_size_);
      victims.push_back(definition.id);
    } else {
      free_.push_back(definition.id);
      table_[definition.id].reset();
    }
  }
  return victims;
}

void Registry::forgot(uint32_t id, Rank rank) {
  Definition* definition = at(id);
  if (!definition || !definition->forgetting) return;
  definition->forgotten.insert(rank);
  if (!definition->forgotten.full()) return;
  table_[id].reset();
  free_.push_back(id);
}

}  // namespace farandole
