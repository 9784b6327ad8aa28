// SPDX-License-Identifier: Apache-2.0
#include "control/channel/mpi_channel.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "lib/os/futex.h"

namespace farandole {
namespace {

constexpr std::chrono::microseconds kShortestSleep{50};
constexpr std::chrono::microseconds kLongestSleep{1000};
constexpr int kBeats = 4;  // in the time after which silence counts as the end

}  // namespace

MpiChannel::MpiChannel(MpiComm& comm, const std::vector<Rank>& peers,
                       std::chrono::milliseconds timeout, std::function<void()> notify)
    : HostChannel(std::move(notify)), comm_(comm), tag_(comm.largest_tag()), timeout_(timeout) {
  for (Rank peer : peers) {
    Link& link = links_[peer];
    link.rank = peer;
    link.heard_ns = link.spoke_ns = now_ns();
    link.head_request = comm_.receive(link.head.data(), kHeadBytes, peer, tag_);
  }
  start("farandole-mpi");
}

MpiChannel::~MpiChannel() {
  stop();
  for (auto& [rank, link] : links_) abandon(link);
}

void MpiChannel::send(Rank peer, ByteView message) {
  std::lock_guard lock(mutex_);
  auto found = links_.find(peer);
  if (found == links_.end() || !found->second.open || found->second.ended) return;
  put(found->second, static_cast<uint32_t>(message.size()), message);
  wake();
}

void MpiChannel::wake() {
  spoken_.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(spoken_, 1, kFutexAnyBit);
}

void MpiChannel::put(Link& link, uint32_t size, ByteView message) {
  const size_t in_head = std::min(message.size(), kRoom);
  Outgoing& out = link.out.emplace_back();
  out.head.resize(kHeadBytes);
  std::memcpy(out.head.data(), &size, sizeof size);
  std::ranges::copy(message.first(in_head), out.head.begin() + sizeof size);
  out.rest.assign(message.begin() + static_cast<ptrdiff_t>(in_head), message.end());
  link.spoke_ns = now_ns();
  try {
    out.head_request = comm_.send(out.head.data(), kHeadBytes, link.rank, tag_);
    if (out.rest.empty()) return;
    const auto rest = static_cast<int>(out.rest.size());
    out.rest_request = comm_.send(out.rest.data(), rest, link.rank, tag_);
  } catch (const Error& error) {
    lose(link, error.what());
  }
}

void MpiChannel::run() {
  std::chrono::microseconds sleep = kShortestSleep;
  for (uint32_t before = 0;;) {
    const uint32_t spoken = spoken_.load(std::memory_order_seq_cst);
    bool moved = std::exchange(before, spoken) != spoken;
    {
      std::lock_guard lock(mutex_);
      if (over()) return;
      for (auto& [rank, link] : links_) moved |= step(link);
    }
    sleep = moved ? kShortestSleep : std::min(2 * sleep, kLongestSleep);
    futex_wait(spoken_, spoken, kFutexAnyBit, Deadline::in(sleep));
  }
}

bool MpiChannel::say_last() {
  bool quiet = true;
  for (auto& [rank, link] : links_) {
    if (link.open && !std::exchange(link.ended, true)) put(link, kEnd, {});
    quiet = quiet && !link.open && link.out.empty();
  }
  return quiet;
}

bool MpiChannel::step(Link& link) {
  try {
    const bool sent = flush(link);
    const bool received = link.open && read(link);
    keep_alive(link);
    return sent || received;
  } catch (const Error& error) {
    lose(link, error.what());
    return true;
  }
}

// In the order of sending: each waits for a receive that the one before lets be posted.
bool MpiChannel::flush(Link& link) {
  bool moved = false;
  while (!link.out.empty()) {
    Outgoing& first = link.out.front();
    if (first.head_request && !first.head_request.test()) break;
    if (first.rest_request && !first.rest_request.test()) break;
    link.out.pop_front();
    moved = true;
  }
  return moved;
}

bool MpiChannel::read(Link& link) {
  bool moved = false;
  while (link.open) {
    if (link.head_request) {
      if (!link.head_request.test() || !take_head(link)) return moved;
    }
    if (link.rest_request && !link.rest_request.test()) return true;
    moved = true;
    if (!link.message.empty()) deliver(link.rank, std::exchange(link.message, {}));
    link.head_request = comm_.receive(link.head.data(), kHeadBytes, link.rank, tag_);
  }
  return moved;
}

// False: it was the last.
bool MpiChannel::take_head(Link& link) {
  uint32_t size = 0;
  std::memcpy(&size, link.head.data(), sizeof size);
  link.heard_ns = now_ns();
  if (size == kEnd) {
    link.open = false;
    deliver_end(link.rank, {});
    return false;
  }
  if (size > kMaxMessage) throw Error(ErrorCode::kInternal, "a message that makes no sense");
  link.message.resize(size);
  const size_t in_head = std::min<size_t>(size, kRoom);
  std::copy_n(link.head.begin() + sizeof size, in_head, link.message.begin());
  if (size > kRoom) {
    link.rest_request =
        comm_.receive(link.message.data() + kRoom, static_cast<int>(size - kRoom), link.rank, tag_);
  }
  return true;
}

void MpiChannel::keep_alive(Link& link) {
  if (!link.open) return;
  const int64_t now = now_ns();
  const int64_t timeout = std::chrono::nanoseconds(timeout_).count();
  if (now - link.heard_ns > timeout) {
    return lose(link, "not a word for " + std::to_string(timeout_.count() / 1000) +
                          " s, FARANDOLE_PEER_TIMEOUT");
  }
  if (!link.ended && now - link.spoke_ns > timeout / kBeats) put(link, kBeat, {});
}

void MpiChannel::lose(Link& link, std::string trouble) {
  abandon(link);
  if (std::exchange(link.open, false)) deliver_end(link.rank, std::move(trouble));
}

// MPI may still read and write what it has not given back: that memory is never used again.
void MpiChannel::abandon(Link& link) noexcept {
  const auto leak = [](ByteString& bytes) { new ByteString(std::move(bytes)); };
  for (MpiRequest* request : {&link.head_request, &link.rest_request}) {
    try {
      if (*request) request->cancel();
    } catch (const Error&) {  // of a peer that is dead: nothing comes any more
    }
  }
  if (link.head_request) leak(link.head);
  if (link.rest_request) leak(link.message);
  for (Outgoing& out : link.out) {
    if (out.head_request) leak(out.head);
    if (out.rest_request) leak(out.rest);
  }
  link.head_request = MpiRequest();
  link.rest_request = MpiRequest();
  link.out.clear();
}

}  // namespace farandole
