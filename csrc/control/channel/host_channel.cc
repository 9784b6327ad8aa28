// SPDX-License-Identifier: Apache-2.0
#include "control/channel/host_channel.h"

#include "lib/os/thread.h"

namespace farandole {

void HostChannel::start(const char* name) {
  thread_ = start_thread(name, [this] { run(); });
}

void HostChannel::stop() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake();
  if (thread_.joinable()) thread_.join();
}

void HostChannel::finish(Deadline deadline) {
  {
    std::lock_guard lock(mutex_);
    finishing_ = true;
    finish_by_ = deadline;
  }
  wake();
  thread_.join();
}

bool HostChannel::over() { return stop_ || (finishing_ && (say_last() || finish_by_.expired())); }

bool HostChannel::drain(const Visitor& visit) {
  if (!has_message_) return false;
  std::deque<std::pair<Rank, ByteString>> messages;
  {
    std::lock_guard lock(inbox_mutex_);
    messages.swap(inbox_);
    has_message_ = false;
  }
  for (auto& [from, message] : messages) visit(from, message);
  return true;
}

std::string HostChannel::trouble_of(Rank peer) const {
  std::lock_guard lock(inbox_mutex_);
  const auto found = troubles_.find(peer);
  return found == troubles_.end() ? std::string() : found->second;
}

void HostChannel::deliver(Rank from, ByteString message) {
  {
    std::lock_guard lock(inbox_mutex_);
    inbox_.emplace_back(from, std::move(message));
    has_message_ = true;
  }
  notify_();
}

void HostChannel::deliver_end(Rank from, std::string trouble) {
  {
    std::lock_guard lock(inbox_mutex_);
    troubles_[from] = std::move(trouble);
  }
  deliver(from, {});
}

}  // namespace farandole
