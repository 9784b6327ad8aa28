// SPDX-License-Identifier: Apache-2.0
#include "control/bootstrap/host_links.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/error.h"

namespace farandole {
namespace {

constexpr std::array kHello{std::byte{'h'}};
constexpr std::chrono::seconds kGiveTimeout{1};

template <class T>
ByteView bytes_of(const T& value) {
  return std::as_bytes(std::span<const T>(&value, 1));
}

}  // namespace

SocketLinks::SocketLinks(const Topology& topology, std::span<const PeerInfo> peer_infos,
                         UnixListener& listener, const JobKey& key,
                         std::unique_ptr<UnixSocket> to_leader, Deadline deadline)
    : leads_(topology.local_rank == 0), leader_(std::move(to_leader)) {
  if (!leads_) {
    const PeerInfo& leader = peer_infos[static_cast<size_t>(topology.leader())];
    if (!leader_) {
      leader_ = std::make_unique<UnixSocket>(
          UnixSocket::connect(leader.listener, proof_at(leader.listener, key), deadline));
    }
    leader_->send(bytes_of(topology.local_rank), {}, deadline);
    return;
  }
  const JobKey proof = proof_at(listener.name(), key);
  members_.resize(topology.local.size());
  for (int i = 1; i < topology.local_size(); ++i) {
    auto link = std::make_unique<UnixSocket>(listener.accept(proof, deadline));
    UnixMessage hello = link->receive(deadline);
    int local = Decoder(hello.bytes).get<int>();
    if (local <= 0 || local >= topology.local_size() || members_[static_cast<size_t>(local)]) {
      throw Error(ErrorCode::kInternal, "a rank sent a malformed first message");
    }
    members_[static_cast<size_t>(local)] = std::move(link);
  }
}

Segment SocketLinks::give(SetId set, const char* label, SegmentSize size,
                          std::span<const int> locals) {
  Segment segment = Segment::create(label, size);
  int fd = segment.fd();
  for (int local : locals) {
    if (auto& link = members_[static_cast<size_t>(local)]) {
      link->send(bytes_of(set), {&fd, 1}, Deadline::in(kGiveTimeout));
    }
  }
  return segment;
}

Segment SocketLinks::receive(SetId set, Deadline deadline) {
  UnixMessage message = leader_->receive(deadline);
  while (Decoder(message.bytes).get<SetId>() != set) message = leader_->receive(deadline);
  if (message.fds.size() != 1) throw Error(ErrorCode::kInternal, "the leader sent no memory");
  return Segment::map(std::move(message.fds.front()));
}

std::vector<Fd> SocketLinks::share(int fd, Deadline deadline) {
  std::vector<Fd> all;
  if (!leads_) {
    leader_->send(kHello, {&fd, 1}, deadline);
    const auto ranks = static_cast<size_t>(Decoder(leader_->receive(deadline).bytes).get<int>());
    while (all.size() < ranks) {
      for (Fd& one : leader_->receive(deadline).fds) all.push_back(std::move(one));
    }
    return all;
  }
  all.emplace_back();  // an empty entry for this rank
  std::vector<int> numbers = {fd};
  for (size_t i = 1; i < members_.size(); ++i) {
    UnixMessage message = members_[i]->receive(deadline);
    if (message.fds.size() != 1) throw Error(ErrorCode::kInternal, "a rank shared no memory");
    all.push_back(std::move(message.fds.front()));
    numbers.push_back(all.back().get());
  }
  const auto ranks = static_cast<int>(numbers.size());
  for (size_t i = 1; i < members_.size(); ++i) {
    members_[i]->send(bytes_of(ranks), {}, deadline);
    for (size_t at = 0; at < numbers.size(); at += UnixSocket::kMaxFds) {
      const std::span<const int> rest = std::span<const int>(numbers).subspan(at);
      members_[i]->send(kHello, rest.first(std::min(rest.size(), UnixSocket::kMaxFds)), deadline);
    }
  }
  return all;
}

void SocketLinks::barrier(Deadline deadline) {
  if (!leads_) {
    leader_->send(kHello, {}, deadline);
    leader_->receive(deadline);
    return;
  }
  for (auto& link : members_) {
    if (link) link->receive(deadline);
  }
  for (auto& link : members_) {
    if (link) link->send(kHello, {}, deadline);
  }
}

}  // namespace farandole
