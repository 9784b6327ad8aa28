// SPDX-License-Identifier: Apache-2.0
// The connections between the ranks of a simulated world: memory inside a host, messages and bytes between hosts. A
// rank that is gone has no part in it any more, and the others hear of that.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "runtime/fabric.h"
#include "runtime/simulation/kernel.h"

namespace farandole::simulation {

class Network {
 public:
  // `node`: by rank, the lowest rank of its host.
  Network(Kernel& kernel, std::vector<Rank> node) : kernel_(kernel), node_(std::move(node)) {}

  // Rank `own` gets this at init.
  Fabric::Parts connect(const Topology& topology, SegmentSize staging, int fan_out);
  // `notify`: wakes the rank when a message has come.
  void open(Rank rank, std::function<void()> notify) { notify_[rank] = std::move(notify); }
  // The memory of every so many sets cannot be had by a leader, or not be mapped by a member.
  void starve(double share) { hunger_ = share; }
  // Nobody hears from this rank any more. Hosts that are linked to it learn that after `patience_ns`.
  void lose(Rank rank, int64_t patience_ns);
  bool lost(Rank rank) const { return lost_.contains(rank); }
  // ---- Between two hosts, by their leaders: control messages, or the bytes of buckets
  enum class Carries : uint8_t { kMessages, kBytes };
  // All that one sends to the other takes up to so long.
  void slow_down(Carries what, Rank from, Rank to, int64_t most_ns) {
    ways_[{what, from, to}].most_ns = most_ns;
  }
  // All that one sends to the other is lost.
  void silence(Carries what, Rank from, Rank to) { ways_[{what, from, to}].silent = true; }
  // Both see the end of their connections.
  void end(Carries what, Rank one, Rank other);

 private:
  class Links;
  class Channel;
  class Line;
  struct Way {
    int64_t most_ns = 20'000;
    bool silent = false, ended = false, told = false;
  };
  // Messages from one leader.
  struct Arrival {
    Rank from;
    ByteString message;
    bool end = false;
  };
  using Given = std::deque<std::pair<SetId, Fd>>;
  using Route = std::tuple<uint64_t, Rank, Rank, Wire::Channel>;  // wire, from, to
  struct Parcel {
    int64_t due_ns;
    ByteString bytes;
  };
  void allocate(const char* what);
  void carry(Rank from, Rank to, ByteString message, bool end, int64_t least_ns);
  Rank host_of(Rank rank) const { return node_[static_cast<size_t>(rank)]; }
  // Between the hosts of these ranks.
  Way& way(Carries what, Rank from, Rank to) { return ways_[{what, host_of(from), host_of(to)}]; }

  Kernel& kernel_;
  const std::vector<Rank> node_;
  std::map<Rank, Given> given_;
  std::map<Rank, std::tuple<Fd, Fd, Fd>> first_;  // by leader: control, staging, flight
  std::map<Rank, std::function<void()>> notify_;
  std::map<Rank, std::deque<Arrival>> inboxes_;
  std::map<Rank, std::vector<Rank>> linked_;
  std::map<std::pair<Rank, Rank>, int64_t> last_;  // arrival on a link
  std::map<std::tuple<Carries, Rank, Rank>, Way> ways_;
  std::map<Route, std::deque<Parcel>> parcels_;
  std::set<Rank> lost_;
  double hunger_ = 0;
};

}  // namespace farandole::simulation
