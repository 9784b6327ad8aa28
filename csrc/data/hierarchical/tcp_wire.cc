// SPDX-License-Identifier: Apache-2.0
#include "data/hierarchical/tcp_wire.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace farandole {
namespace {

// A ticket combines a line's index with the message's number on that line.
constexpr int kNumberBits = 40;
constexpr int64_t kNumberMask = (int64_t{1} << kNumberBits) - 1;

}  // namespace

TcpWire::TcpWire(std::shared_ptr<TcpEnds> ends, std::vector<Rank> ranks, uint64_t number)
    : ends_(std::move(ends)),
      ranks_(std::move(ranks)),
      number_(number),
      lines_(2 * ranks_.size() * kChannels * kStreams),
      posted_(2 * ranks_.size() * kChannels) {
  ends_->listener.expect(callers());
}

TcpWire::~TcpWire() { ends_->listener.forget(callers()); }

Wire::Ticket TcpWire::send(int member, Channel channel, const std::byte* data, size_t bytes) {
  return post(true, member, channel, const_cast<std::byte*>(data), bytes);  // only read
}

Wire::Ticket TcpWire::receive(int member, Channel channel, std::byte* data, size_t bytes) {
  return post(false, member, channel, data, bytes);
}

// Both ends count a channel's messages, so they know which stream carries which message.
Wire::Ticket TcpWire::post(bool sends, int member, Channel channel, std::byte* data, size_t bytes) {
  const size_t route = ((sends ? ranks_.size() : 0) + static_cast<size_t>(member)) * kChannels +
                       static_cast<size_t>(channel);
  const uint64_t stream = posted_[route]++ % kStreams;
  const size_t index = route * kStreams + stream;
  Line& line = lines_[index];
  line.peer = ranks_.at(static_cast<size_t>(member));
  line.sends = sends;
  line.name = 1 + (number_ * kChannels + static_cast<uint64_t>(channel)) * kStreams + stream;
  line.transfers.push_back(bytes == 0 ? Transfer{&nothing_, 1} : Transfer{data, bytes});
  if (sends) move(line);
  return static_cast<Ticket>(index) << kNumberBits | static_cast<Ticket>(line.posted++);
}

void TcpWire::move() {
  for (Line& line : lines_) {
    if (!line.transfers.empty()) move(line);
  }
}

bool TcpWire::done(Ticket ticket) {
  if (fault_.check()) return false;
  const Line& line = lines_[static_cast<size_t>(ticket >> kNumberBits)];
  return line.complete > static_cast<uint64_t>(ticket & kNumberMask);
}

// No receive is left in the kernel, so the memory is free at once.
bool TcpWire::abandon() {
  lines_.clear();
  return true;
}

// A silent listener's rank has not opened this wire yet; the backend limits how long we wait for it.
bool TcpWire::open(Line& line) {
  TcpEnds& ends = *ends_;
  if (!line.sends) {
    line.fd = ends.listener.take(ends.rank, line.peer, line.name, ends.key);
  } else {
    if (!line.caller) {
      const TcpAddress& address = ends.addresses[static_cast<size_t>(line.peer)];
      line.caller = std::make_unique<TcpCaller>(ends.rank, line.peer, line.name, address, ends.key);
    }
    if (line.caller->step()) {
      line.fd = std::move(line.caller->fd());
      line.caller.reset();
    } else if (line.caller->refused_for(ends.timeout)) {
      fail(line, line.caller->trouble());
    }
  }
  return static_cast<bool>(line.fd);
}

void TcpWire::move(Line& line) {
  if (!line.fd && !open(line)) return;
  while (!line.transfers.empty()) {
    Transfer& next = line.transfers.front();
    const ssize_t n =
        line.sends ? ::send(line.fd.get(), next.data, next.bytes, MSG_NOSIGNAL | MSG_DONTWAIT)
                   : ::recv(line.fd.get(), next.data, next.bytes, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) return fail(line, n == 0 ? "it has closed its connection" : std::strerror(errno));
    next.data += n;
    next.bytes -= static_cast<size_t>(n);
    if (next.bytes > 0) continue;
    line.transfers.pop_front();
    ++line.complete;
  }
}

void TcpWire::fail(const Line& line, const std::string& why) {
  fault_.set(line.peer, ends_->host_names[static_cast<size_t>(line.peer)], "TCP", why);
}

}  // namespace farandole
