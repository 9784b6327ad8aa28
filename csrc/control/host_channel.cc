// SPDX-License-Identifier: Apache-2.0
#include "control/host_channel.h"

namespace farandole {

bool HostChannel::drain(const Visitor& visit) {
  if (!has_message_) return false;
  std::deque<std::pair<Rank, ByteString>> messages;
  {
    std::lock_guard lock(mutex_);
    messages.swap(inbox_);
    has_message_ = false;
  }
  for (auto& [from, message] : messages) visit(from, message);
  return true;
}

std::string HostChannel::trouble_of(Rank peer) const {
  std::lock_guard lock(mutex_);
  const auto found = troubles_.find(peer);
  return found == troubles_.end() ? std::string() : found->second;
}

void HostChannel::deliver(Rank from, ByteString message) {
  {
    std::lock_guard lock(mutex_);
    inbox_.emplace_back(from, std::move(message));
    has_message_ = true;
  }
  notify_();
}

void HostChannel::deliver_end(Rank from, std::string trouble) {
  {
    std::lock_guard lock(mutex_);
    troubles_[from] = std::move(trouble);
  }
  deliver(from, {});
}

}  // namespace farandole
