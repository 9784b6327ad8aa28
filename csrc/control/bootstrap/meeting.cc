// SPDX-License-Identifier: Apache-2.0
#include "control/bootstrap/meeting.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <tuple>
#include <utility>

#include "base/build_id.h"
#include "base/error.h"
#include "kernels/kernels.h"
#include "lib/os/process.h"

namespace farandole {
namespace {

constexpr std::array kHello{std::byte{'h'}};
constexpr std::chrono::seconds kGiveTimeout{10};
constexpr int kClockRounds = 5;

// Ranks by the value of one field; more than one value is a disagreement.
using Opinions = std::map<std::string, std::vector<Rank>>;

std::string text_of(const Opinions& opinions) {
  std::string text;
  for (auto& [value, ranks] : opinions) {
    text += (text.empty() ? "" : "; ") + ("'" + value + "' on ") + text_of_ranks(ranks);
  }
  return text;
}

template <class Field>
Opinions opinions_about(std::span<const Card> cards, Field&& field) {
  Opinions opinions;
  for (size_t r = 0; r < cards.size(); ++r) {
    opinions[field(cards[r])].push_back(static_cast<Rank>(r));
  }
  return opinions;
}

template <class T>
ByteView bytes_of(const T& value) {
  return std::as_bytes(std::span<const T>(&value, 1));
}

}  // namespace

ByteString Card::encode() const {
  ByteString out;
  {
    Encoder e(out);
    e.put(build), e.put(cpu_targets), e.put(job_wide), e.put(pid), e.put(start_time);
    e.put(pid_namespace), e.put(net_namespace), e.put(boot_id);
    e.put(host), e.put(door), e.put(key), e.put(static_cast<uint32_t>(tcp.hosts.size()));
    for (const std::string& host : tcp.hosts) e.put(host);
    e.put(tcp.port);
  }
  return out;
}

Card Card::decode(ByteView in) {
  Decoder d(in);
  Card c;
  c.build = d.get_string();
  c.cpu_targets = d.get_string();
  c.job_wide = d.get_string();
  c.pid = d.get<int64_t>();
  c.start_time = d.get<uint64_t>();
  c.pid_namespace = d.get<uint64_t>();
  c.net_namespace = d.get<uint64_t>();
  c.boot_id = d.get_string();
  c.host = d.get_string();
  c.door = d.get_string();
  c.key = d.get<JobKey>();
  c.tcp.hosts.resize(d.get_count(sizeof(uint32_t)));
  for (std::string& host : c.tcp.hosts) host = d.get_string();
  c.tcp.port = d.get<uint16_t>();
  return c;
}

Card own_card(const Config& config, const UnixListener& door, const TcpAddress& tcp,
              const JobKey& key) {
  Card card;
  card.build = build_id();
  for (const char* target : kernels::targets_available()) {
    card.cpu_targets += (card.cpu_targets.empty() ? "" : ",") + std::string(target);
  }
  card.job_wide = job_wide_text(config);
  card.pid = ::getpid();
  card.start_time = process_start_time(::getpid()).value_or(0);
  card.pid_namespace = pid_namespace();
  card.net_namespace = net_namespace();
  card.boot_id = boot_id();
  card.host = host_name();
  card.door = door.name();
  card.key = key;
  card.tcp = tcp;
  return card;
}

void check_agreement(std::span<const Card> cards) {
  Opinions builds = opinions_about(cards, [](const Card& c) { return c.build; });
  if (builds.size() > 1) {
    throw Error(ErrorCode::kMismatch, "the ranks run different builds of farandole: " +
                                          text_of(builds) + "; install the same one everywhere");
  }
}

Rank nearest_leader(Rank own, const std::vector<Rank>& node, std::span<const Card> cards) {
  const auto place = [&](Rank rank) {
    const Card& card = cards[static_cast<size_t>(rank)];
    return std::tie(node[static_cast<size_t>(rank)], card.boot_id, card.net_namespace);
  };
  Rank lowest = 0;
  while (place(lowest) != place(own)) ++lowest;
  return lowest;
}

HostLinks::HostLinks(const Topology& topology, std::span<const Card> cards, UnixListener& door,
                     std::unique_ptr<UnixSocket> to_leader, Deadline deadline)
    : leads_(topology.local_rank == 0), leader_(std::move(to_leader)) {
  if (!leads_) {
    const Card& leader = cards[static_cast<size_t>(topology.leader())];
    if (!leader_) {
      leader_ =
          std::make_unique<UnixSocket>(UnixSocket::connect(leader.door, leader.key, deadline));
    }
    leader_->send(bytes_of(topology.local_rank), {}, deadline);
    return;
  }
  members_.resize(topology.local.size());
  for (int i = 1; i < topology.local_size(); ++i) {
    auto link = std::make_unique<UnixSocket>(door.accept(deadline));
    UnixMessage hello = link->receive(deadline);
    int local = Decoder(hello.bytes).get<int>();
    if (local <= 0 || local >= topology.local_size() || members_[static_cast<size_t>(local)]) {
      throw Error(ErrorCode::kInternal, "a rank introduced itself wrongly");
    }
    members_[static_cast<size_t>(local)] = std::move(link);
  }
}

Segment HostLinks::give(const char* label, size_t bytes, std::span<const int> locals) {
  Segment segment = Segment::create(label, bytes);
  int fd = segment.fd();
  for (int local : locals) {
    if (auto& link = members_[static_cast<size_t>(local)]) {
      link->send(kHello, {&fd, 1}, Deadline::in(kGiveTimeout));
    }
  }
  return segment;
}

Segment HostLinks::receive(Deadline deadline) {
  UnixMessage message = leader_->receive(deadline);
  if (message.fds.size() != 1) throw Error(ErrorCode::kInternal, "the leader sent no memory");
  return Segment::map(std::move(message.fds.front()));
}

std::vector<Fd> HostLinks::share(int fd, Deadline deadline) {
  std::vector<Fd> all;
  if (!leads_) {
    leader_->send(kHello, {&fd, 1}, deadline);
    const auto ranks = static_cast<size_t>(Decoder(leader_->receive(deadline).bytes).get<int>());
    while (all.size() < ranks) {
      for (Fd& one : leader_->receive(deadline).fds) all.push_back(std::move(one));
    }
    return all;
  }
  all.emplace_back();  // own
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

ClockOffset HostLinks::measure_clock(Deadline deadline) {
  if (leads_) {
    for (auto& link : members_) {
      for (int round = 0; link && round < kClockRounds; ++round) {
        link->receive(deadline);
        const int64_t now = now_ns();
        link->send(bytes_of(now), {}, deadline);
      }
    }
    return {};
  }
  ClockOffset best{0, std::numeric_limits<int64_t>::max()};
  for (int round = 0; round < kClockRounds; ++round) {
    const int64_t asked = now_ns();
    leader_->send(kHello, {}, deadline);
    const UnixMessage answer = leader_->receive(deadline);
    const int64_t half = (now_ns() - asked + 1) / 2;
    if (half < best.error_ns) best = {asked + half - Decoder(answer.bytes).get<int64_t>(), half};
  }
  return best;
}

void HostLinks::barrier(Deadline deadline) {
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
