// SPDX-License-Identifier: Apache-2.0
#include "data/hierarchical/tcp_wire.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace farandole {
namespace {

// A ticket consists of a connection's index and the number of a message on that connection.
constexpr int kNumberBits = 40;
constexpr int64_t kNumberMask = (int64_t{1} << kNumberBits) - 1;

}  // namespace

TcpWire::TcpWire(std::shared_ptr<TcpEnds> ends, std::vector<Rank> ranks, uint64_t number)
    : ends_(std::move(ends)),
      ranks_(std::move(ranks)),
      number_(number),
      connections_(2 * ranks_.size() * kChannels * kStreams),
      posted_(2 * ranks_.size() * kChannels) {
  ends_->listener.expect(callers());
}

TcpWire::~TcpWire() { ends_->listener.forget(callers()); }

Wire::Ticket TcpWire::send(int member, Channel channel, const std::byte* data, size_t bytes) {
  return post(true, member, channel, const_cast<std::byte*>(data), bytes);  // send() only reads it
}

Wire::Ticket TcpWire::receive(int member, Channel channel, std::byte* data, size_t bytes) {
  return post(false, member, channel, data, bytes);
}

// Both ends count a channel's messages, so both know which stream carries which message.
Wire::Ticket TcpWire::post(bool sends, int member, Channel channel, std::byte* data, size_t bytes) {
  const size_t route = ((sends ? ranks_.size() : 0) + static_cast<size_t>(member)) * kChannels +
                       static_cast<size_t>(channel);
  const uint64_t stream = posted_[route]++ % kStreams;
  const size_t index = route * kStreams + stream;
  Connection& connection = connections_[index];
  connection.peer = ranks_.at(static_cast<size_t>(member));
  connection.sends = sends;
  connection.name = 1 + (number_ * kChannels + static_cast<uint64_t>(channel)) * kStreams + stream;
  connection.transfers.push_back(bytes == 0 ? Transfer{&nothing_, 1} : Transfer{data, bytes});
  if (sends) move(connection);
  return static_cast<Ticket>(index) << kNumberBits | static_cast<Ticket>(connection.posted++);
}

void TcpWire::move() {
  for (Connection& connection : connections_) {
    if (!connection.transfers.empty()) move(connection);
  }
}

// Returns false if a fault is withheld, or if a connection in use is not watched because it is still being opened or
// because the poller had no room.
bool TcpWire::wakes() const {
  return ends_->poller && !fault_ && std::ranges::all_of(connections_, [](const Connection& one) {
           return one.transfers.empty() || one.watched;
         });
}

bool TcpWire::done(Ticket ticket) {
  if (fault_.check()) return false;
  const Connection& connection = connections_[static_cast<size_t>(ticket >> kNumberBits)];
  return connection.complete > static_cast<uint64_t>(ticket & kNumberMask);
}

// The kernel does not keep a pointer to a receive's memory, so the caller may reuse the memory immediately.
bool TcpWire::abandon() {
  connections_.clear();
  return true;
}

// Continues to open a connection. If the peer does not answer, it has not opened this wire yet. The backend limits the
// time for which it waits for such a peer.
bool TcpWire::open(Connection& connection) {
  TcpEnds& ends = *ends_;
  if (!connection.sends) {
    connection.fd = ends.listener.take(ends.rank, connection.peer, connection.name, ends.key);
  } else {
    if (!connection.caller) {
      const TcpAddress& address = ends.addresses[static_cast<size_t>(connection.peer)];
      connection.caller = std::make_unique<TcpCaller>(ends.rank, connection.peer, connection.name,
                                                      address, ends.key);
    }
    if (connection.caller->step()) {
      connection.fd = std::move(connection.caller->fd());
      connection.caller.reset();
    } else if (connection.caller->refused_for(ends.timeout)) {
      fail(connection, connection.caller->trouble());
    }
  }
  if (connection.fd && ends.poller) connection.watched = ends.poller->watch(connection.fd.get());
  return static_cast<bool>(connection.fd);
}

void TcpWire::move(Connection& connection) {
  if (!connection.fd && !open(connection)) return;
  while (!connection.transfers.empty()) {
    Transfer& next = connection.transfers.front();
    const ssize_t n =
        connection.sends
            ? ::send(connection.fd.get(), next.data, next.bytes, MSG_NOSIGNAL | MSG_DONTWAIT)
            : ::recv(connection.fd.get(), next.data, next.bytes, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0)
      return fail(connection, n == 0 ? "it has closed its connection" : std::strerror(errno));
    next.data += n;
    next.bytes -= static_cast<size_t>(n);
    if (next.bytes > 0) continue;
    connection.transfers.pop_front();
    ++connection.complete;
  }
}

void TcpWire::fail(const Connection& connection, const std::string& why) {
  fault_.set(connection.peer, ends_->host_names[static_cast<size_t>(connection.peer)], "TCP", why);
}

}  // namespace farandole
