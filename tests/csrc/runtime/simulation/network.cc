// SPDX-License-Identifier: Apache-2.0
#include "runtime/simulation/network.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "check.h"
#include "watch/flight_memory.h"

namespace farandole::simulation {
namespace {

constexpr const char* kDied =
    "has ended: that rank died; see its own output for the reason (killed, out of memory, "
    "crashed?)";

Fd copy_of(const Fd& fd) { return Fd(fcntl(fd.get(), F_DUPFD_CLOEXEC, 0)); }

}  // namespace

// ---- Memory

// Pages come when they are touched: real segments are allocated at once, which takes longer than a whole world.
Fd create_memory(size_t bytes) {
  Fd fd(memfd_create("simulation", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK(fd && ftruncate(fd.get(), static_cast<off_t>(bytes)) == 0);
  CHECK_EQ(fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
  return fd;
}

// The number of a segment, wherever it is mapped, is that of its file.
Segment map_memory(Kernel& kernel, Fd fd) {
  struct stat status;
  CHECK_EQ(fstat(fd.get(), &status), 0);
  Segment segment = Segment::map(std::move(fd));
  kernel.map(segment.data(), segment.size(), 2 + status.st_ino);
  return segment;
}

void Network::allocate(const char* what) {
  if (hunger_ > 0 && kernel_.random().chance(hunger_)) {
    throw Error(ErrorCode::kLibrary, std::string("there is no memory to ") + what);
  }
}

class Network::Links final : public HostLinks {
 public:
  Links(Network& network, const Topology& topology) : network_(network), topology_(topology) {}

  Segment give(SetId set, const char*, SegmentSize size, std::span<const int> locals) override {
    network_.allocate("create");
    Fd fd = create_memory(size.bytes);
    for (int local : locals) {
      const Rank to = topology_.local[static_cast<size_t>(local)];
      if (to != topology_.rank) network_.given_[to].emplace_back(set, copy_of(fd));
    }
    return map_memory(network_.kernel_, std::move(fd));
  }
  // Whatever an entry of the log needs has been given before the entry.
  Segment receive(SetId set, Deadline) override {
    Given& given = network_.given_[topology_.rank];
    while (!given.empty()) {
      auto [its, fd] = std::move(given.front());
      given.pop_front();
      if (its != set) continue;
      network_.allocate("map");
      return map_memory(network_.kernel_, std::move(fd));
    }
    check::fail("a rank waits for memory that its leader has not given");
  }

 private:
  Network& network_;
  const Topology& topology_;
};

// ---- Messages

class Network::Channel final : public HostChannel {
 public:
  Channel(Network& network, Rank own) : network_(network), own_(own) {}
  ~Channel() override { network_.notify_.erase(own_); }

  void send(Rank peer, ByteView message) override {
    network_.carry(own_, peer, ByteString(message.begin(), message.end()), false, 0);
  }
  void finish(Deadline) override {
    for (Rank peer : network_.linked_[own_]) {
      if (!network_.way(Carries::kMessages, own_, peer).silent)
        network_.carry(own_, peer, {}, true, 0);
    }
  }
  bool drain(const OnMessage& hear, const OnEnd& lose) override {
    std::deque<Arrival> arrivals;
    arrivals.swap(network_.inboxes_[own_]);
    for (const Arrival& arrival : arrivals) {
      if (arrival.end) {
        lose(arrival.from, kDied);
      } else {
        hear(arrival.from, arrival.message);
      }
    }
    return !arrivals.empty();
  }
  bool has_message() const override { return !network_.inboxes_[own_].empty(); }

 private:
  Network& network_;
  const Rank own_;
};

// In order. The end of a link is its last.
void Network::carry(Rank from, Rank to, ByteString message, bool end, int64_t least_ns) {
  Way& own = way(Carries::kMessages, from, to);
  if (lost(to) || (!end && (lost(from) || own.silent || own.ended))) return;
  if (end && std::exchange(own.told, true)) return;
  int64_t& last = last_[{from, to}];
  last = std::max(last, kernel_.now_ns() + std::max(kernel_.delay(own.most_ns), least_ns));
  auto arrival = std::make_shared<Arrival>(Arrival{from, std::move(message), end});
  kernel_.at(last, [this, to, arrival] {
    if (lost(to) || (!arrival->end && way(Carries::kMessages, arrival->from, to).silent)) return;
    inboxes_[to].push_back(std::move(*arrival));
    if (notify_.contains(to)) notify_[to]();
  });
}

void Network::lose(Rank rank, int64_t patience_ns) {
  if (!lost_.insert(rank).second) return;
  notify_.erase(rank);
  for (Rank peer : linked_[rank]) carry(rank, peer, {}, true, patience_ns);
}

// Messages under way may be lost, too.
void Network::end(Carries what, Rank one, Rank other) {
  const bool at_once = kernel_.random().chance(0.5);
  const auto& links = linked_[one];
  const bool linked = what == Carries::kMessages && std::ranges::count(links, other) > 0;
  for (auto [from, to] : {std::pair(one, other), std::pair(other, one)}) {
    Way& way = ways_[{what, from, to}];
    way.ended = true;
    way.silent = way.silent || at_once;
    if (linked) carry(from, to, {}, true, 0);
  }
}

// ---- Bytes

class Network::Line final : public Wire {
 public:
  Line(Network& network, Rank own, std::vector<Rank> ranks, uint64_t number)
      : network_(network), own_(own), ranks_(std::move(ranks)), number_(number) {}

  size_t most_bytes() const override { return 4096; }
  Ticket send(int member, Channel channel, const std::byte* data, size_t bytes) override {
    const Rank to = ranks_.at(static_cast<size_t>(member));
    const Way& way = network_.way(Carries::kBytes, own_, to);
    const int64_t due = network_.kernel_.now_ns() + network_.kernel_.delay(way.most_ns);
    if (way.ended) {
      fault_.set(to, "a host", "a line", "it has closed its connection");
    } else if (!network_.lost(own_) && !way.silent) {
      network_.parcels_[{number_, own_, to, channel}].push_back({due, {data, data + bytes}});
    }
    return -1;
  }
  Ticket receive(int member, Channel channel, std::byte* data, size_t bytes) override {
    const Rank from = ranks_.at(static_cast<size_t>(member));
    waiting_[{number_, from, own_, channel}].push_back({posted_, data, bytes});
    open_.insert(posted_);
    return posted_++;
  }
  void move() override {
    for (auto& [route, waiting] : waiting_) {
      auto& parcels = network_.parcels_[route];
      while (!waiting.empty() && !parcels.empty()) {
        if (parcels.front().due_ns > network_.kernel_.now_ns()) break;
        const Receive& next = waiting.front();
        CHECK_EQ(parcels.front().bytes.size(), next.bytes);
        if (next.bytes > 0) std::memcpy(next.data, parcels.front().bytes.data(), next.bytes);
        open_.erase(next.ticket);
        waiting.pop_front();
        parcels.pop_front();
      }
      const Rank from = std::get<1>(route);
      const bool ended = network_.lost(from) || network_.way(Carries::kBytes, from, own_).ended;
      if (!waiting.empty() && parcels.empty() && ended) {
        fault_.set(from, "a host", "a line", "it has closed its connection");
      }
    }
  }
  bool done(Ticket ticket) override { return !fault_.check() && !open_.contains(ticket); }
  bool abandon() override {
    waiting_.clear();
    open_.clear();
    return true;
  }

 private:
  struct Receive {
    Ticket ticket;
    std::byte* data;
    size_t bytes;
  };
  Network& network_;
  const Rank own_;
  const std::vector<Rank> ranks_;
  const uint64_t number_;
  Ticket posted_ = 0;
  std::map<Route, std::deque<Receive>> waiting_;
  std::set<Ticket> open_;
  WireFault fault_;
};

// ---- All of it

Fabric::Parts Network::connect(const Topology& topology, SegmentSize staging, int fan_out) {
  const Rank leader = topology.leader();
  const int ranks = topology.local_size();
  if (!first_.contains(leader)) {
    Fd flight = create_memory(FlightMemory::bytes_needed(ranks, topology.size));
    const Segment mapped = Segment::map(copy_of(flight));
    FlightMemory(mapped.data(), ranks, topology.size).prepare();
    first_[leader] = {create_memory(ShmLayout::bytes_needed(ranks)), create_memory(staging.bytes),
                      std::move(flight)};
  }
  auto& [control, world, flight] = first_[leader];
  Fabric::Parts parts;
  parts.control = map_memory(kernel_, copy_of(control));
  parts.staging = map_memory(kernel_, copy_of(world));
  parts.flight = map_memory(kernel_, copy_of(flight));
  parts.links = std::make_unique<Links>(*this, topology);
  if (ranks == topology.size) return parts;
  if (topology.local_rank == 0) {
    parts.tree = HostTree::of(topology.rank, topology.node, fan_out);
    if (parts.tree.parent >= 0) linked_[topology.rank].push_back(parts.tree.parent);
    for (const HostTree::Branch& child : parts.tree.children)
      linked_[topology.rank].push_back(child.leader);
    parts.hosts = std::make_unique<Channel>(*this, topology.rank);
  }
  parts.open_wire = [this, own = topology.rank](const std::vector<Rank>& all, uint64_t number) {
    return std::make_unique<Line>(*this, own, all, number);
  };
  return parts;
}

}  // namespace farandole::simulation
