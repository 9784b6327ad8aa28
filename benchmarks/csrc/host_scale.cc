// SPDX-License-Identifier: Apache-2.0
// Measures a training step's cost on rank 0 if each host's leader forwards its ranks' reports: messages, bytes and CPU
// time, for 8 to 16,384 ranks, 8 per host. ResNet-50's tensors become ready in reverse order, with 5 % lognormal jitter
// on each rank, and are reported one by one, or in batches as by the torch adapter.
// `host_scale [TENSORS [RANKS ...]]` prints a table; 1,000 tensors by default.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "control/coordinator/coordinator.h"
#include "control/hosts/aggregator.h"
#include "control/hosts/host_tree.h"

namespace {

using namespace farandole;

constexpr int kRanksPerHost = 8;
constexpr int kSteps = 5;
constexpr double kStepSeconds = 0.1;  // from the first gradient to the last
constexpr double kJitter = 0.05;      // relative, of each gradient's time
constexpr double kRound = 1e-4;       // seconds; reports within this time form one batch
constexpr int64_t kRoom =
    64 << 10;  // most bytes that wait to be sent, as in adapters/torch/gradients/encoding.py
constexpr int64_t kEach = 2 << 10;  // added to each tensor's size

// Sizes of ResNet-50's tensors, repeated up to this number of tensors.
std::vector<int64_t> elements_of(int tensors) {
  std::vector<int64_t> model;
  const auto layer = [&](int64_t in, int64_t out, int64_t kernel) {
    for (int64_t elements : {in * out * kernel * kernel, out, out}) model.push_back(elements);
  };
  layer(3, 64, 7);
  int64_t in = 64;
  for (auto [width, blocks] : {std::pair{64, 3}, {128, 4}, {256, 6}, {512, 3}}) {
    for (int block = 0; block < blocks; ++block) {
      layer(in, width, 1), layer(width, width, 3), layer(width, 4 * width, 1);
      if (block == 0) layer(in, 4 * width, 1);
      in = 4 * width;
    }
  }
  model.push_back(2048 * 1000), model.push_back(1000);
  std::vector<int64_t> elements;
  for (size_t t = 0; std::cmp_less(t, tensors); ++t) elements.push_back(model[t % model.size()]);
  return elements;
}

int64_t cpu_ns() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

struct Cost {
  int64_t messages = 0;     // received by the root
  int64_t bytes = 0;        // of these messages
  int64_t most = 0;         // most messages of one leader
  int64_t entry_bytes = 0;  // bytes of log entries, which each host reads once
  int64_t cpu_ns = 0;
};

// A report on its way to its host's leader.
struct Arrival {
  double seconds;
  Rank rank;
  size_t report;
};

class World {
 public:
  World(int ranks, int tensors, bool batched)
      : ranks_(ranks),
        tensors_(tensors),
        batched_(batched),
        elements_(elements_of(tensors)),
        coordinator_(settings(ranks)) {
    for (Rank r = 0; r < ranks; ++r) nodes_.push_back(r - r % kRanksPerHost);
    for (Rank leader = 0; leader < ranks; leader += kRanksPerHost) {
      HostTree tree = HostTree::of(leader, nodes_);
      std::vector<Rank> below;
      for (Rank r = leader; r < std::min(ranks, leader + kRanksPerHost); ++r) below.push_back(r);
      for (auto& child : tree.children) {
        if (leader == 0) groups_[child.leader] = coordinator_.add_group(child.ranks);
        if (leader > 0) below.insert(below.end(), child.ranks.begin(), child.ranks.end());
      }
      std::ranges::sort(below);
      hosts_.push_back(
          {tree, leader == 0 ? nullptr : std::make_unique<Aggregator>(ranks, below), 0});
    }
    std::vector<Rank> all(static_cast<size_t>(ranks));
    std::iota(all.begin(), all.end(), 0);
    world_ = coordinator_.add_group(std::move(all));
    for (int repeat = 0; repeat < 4; ++repeat) warm_up();
  }

  Cost step(std::mt19937_64& random) {
    cost_ = {};
    for (Host& host : hosts_) host.sent = 0;
    double until = kRound;
    for (const Arrival& arrival : arrivals(random)) {
      while (arrival.seconds > until) {
        serve(until);
        until += kRound;
      }
      const ByteString& report = reports_[arrival.report];
      Host& host = hosts_[static_cast<size_t>(arrival.rank / kRanksPerHost)];
      if (host.aggregator) {
        host.aggregator->receive(arrival.rank, report, ns(arrival.seconds));
      } else {
        local_.emplace_back(arrival.rank, &report);
      }
    }
    while (!quiet()) serve(until += kRound);
    for (int i = 0; i < 8; ++i) serve(until += kRound);  // the last buckets
    for (const Host& host : hosts_) cost_.most = std::max(cost_.most, host.sent);
    begun_ += until;
    return cost_;
  }

 private:
  struct Host {
    HostTree tree;
    std::unique_ptr<Aggregator> aggregator;  // null: the root's own host
    int64_t sent;
  };

  // True if nothing waits below the root.
  bool quiet() const {
    return std::ranges::all_of(hosts_, [](const Host& host) {
      return !host.aggregator || host.aggregator->next_tick() == INT64_MAX;
    });
  }
  // Converts seconds of this step to the job's clock, which runs on from step to step.
  int64_t ns(double seconds) const { return static_cast<int64_t>((begun_ + seconds) * 1e9); }
  static Coordinator::Settings settings(int ranks) {
    Coordinator::Settings settings;
    settings.size = ranks;
    return settings;
  }

  // All ranks report everything, untimed: first by name, then by id.
  void warm_up() {
    for (int t = tensors_ - 1; t >= 0; --t) {
      if (auto known = ids_.find(t); known != ids_.end()) {
        coordinator_.receive_all(world_, ReadyMany{{known->second}}, 0);
        continue;
      }
      Ready ready;
      ready.contribution.has_input = true;
      ready.request = {kWorldSet, "grad." + std::to_string(t), {}};
      ready.request.signature.shape = {elements_[static_cast<size_t>(t)]};
      for (Rank rank = 0; rank < ranks_; ++rank) coordinator_.receive(rank, ready, 0);
    }
    for (int i = 0; i < 64; ++i) publish();
  }

  // Encodes the reports of a step. Returns the index of the report that has each tensor.
  std::vector<size_t> cut_into_reports() {
    std::vector<size_t> report_of(static_cast<size_t>(tensors_));
    ReadyMany many;
    int64_t room = kRoom;
    reports_.clear();
    for (int t = tensors_ - 1; t >= 0; --t) {
      const auto tensor = static_cast<size_t>(t);
      many.ids.add(ids_.at(t));
      report_of[tensor] = reports_.size();
      room -= 4 * elements_[tensor] + kEach;
      if (batched_ && room > 0 && t > 0) continue;
      encode(Report(std::exchange(many, {})), reports_.emplace_back());
      room = kRoom;
    }
    return report_of;
  }

  // Ranks, reports and their times. A batch arrives with its last tensor.
  std::vector<Arrival> arrivals(std::mt19937_64& random) {
    std::lognormal_distribution<double> jitter(0, kJitter);
    std::vector<Arrival> arrivals;
    const std::vector<size_t> report_of = cut_into_reports();
    std::vector<double> when(reports_.size());
    for (Rank rank = 0; rank < ranks_; ++rank) {
      std::ranges::fill(when, 0);
      for (int i = 0; i < tensors_; ++i) {
        double& time = when[report_of[static_cast<size_t>(tensors_ - 1 - i)]];
        time = std::max(time, kStepSeconds * (i + 1) / tensors_ * jitter(random));
      }
      for (size_t i = 0; i < when.size(); ++i) arrivals.push_back({when[i], rank, i});
    }
    std::ranges::sort(arrivals, {}, &Arrival::seconds);
    return arrivals;
  }

  // Forwards reports once, from the leaves of the tree to the root.
  void serve(double now) {
    std::vector<std::pair<Rank, ByteString>> for_root;
    for (size_t h = hosts_.size(); h-- > 1;) {
      Host& host = hosts_[h];
      host.aggregator->tick(ns(now));
      ByteString up = host.aggregator->take(ns(now));
      if (up.empty()) continue;
      ++host.sent;
      const Rank leader = static_cast<Rank>(h) * kRanksPerHost;
      if (host.tree.parent == 0) {
        for_root.emplace_back(leader, std::move(up));
        continue;
      }
      Host& above = hosts_[static_cast<size_t>(host.tree.parent / kRanksPerHost)];
      auto branch = std::ranges::find(above.tree.children, leader, &HostTree::Branch::leader);
      for_each_record(up, branch->ranks, [&](const std::vector<Rank>& ranks, ByteView report) {
        above.aggregator->receive(ranks, branch->ranks, report, ns(now));
      });
    }
    for (auto& [rank, report] : local_) count(report->size());
    for (auto& [leader, message] : for_root) count(message.size());
    int64_t start = cpu_ns();
    for (auto& [rank, report] : local_) {
      coordinator_.receive(rank, decode_report(*report), ns(now));
    }
    for (auto& [leader, message] : for_root) {
      auto branch = std::ranges::find(hosts_[0].tree.children, leader, &HostTree::Branch::leader);
      for_each_record(message, branch->ranks, [&](const std::vector<Rank>& ranks, ByteView bytes) {
        const Report report = decode_report(bytes);
        if (ranks.empty()) return coordinator_.receive_all(groups_.at(leader), report, ns(now));
        for (Rank r : ranks) coordinator_.receive(r, report, ns(now));
      });
    }
    cost_.cpu_ns += cpu_ns() - start;
    local_.clear();
    publish();
  }

  void count(size_t bytes) {
    ++cost_.messages;
    cost_.bytes += static_cast<int64_t>(bytes);
  }

  void publish() {
    int64_t start = cpu_ns();
    entries_.clear();
    encoded_.clear();
    coordinator_.publish(entries_);
    for (const Entry& entry : entries_) encode(entry, encoded_);
    cost_.cpu_ns += cpu_ns() - start;
    cost_.entry_bytes += std::ssize(encoded_);
    for (const Entry& entry : entries_) {
      for (Host& host : hosts_) {
        if (host.aggregator) host.aggregator->read(entry);
      }
      read(entry);
    }
  }

  void read(const Entry& entry) {
    if (auto* define = std::get_if<Define>(&entry)) {
      const std::string& name = define->request.name;
      int tensor = std::atoi(name.c_str() + name.rfind('.') + 1);
      ids_[tensor] = define->id;
    }
    if (auto* run = std::get_if<Run>(&entry)) {
      coordinator_.receive(0, Done{run->set, run->bucket}, 0);
    }
  }

  const int ranks_;
  const int tensors_;
  const bool batched_;
  const std::vector<int64_t> elements_;
  Coordinator coordinator_;
  std::vector<Rank> nodes_;
  std::vector<Host> hosts_;
  std::map<Rank, int> groups_;  // by leader
  int world_;
  std::map<int, uint32_t> ids_;  // by tensor
  std::vector<ByteString> reports_;
  std::vector<std::pair<Rank, const ByteString*>> local_;
  std::vector<Entry> entries_;
  ByteString encoded_;
  Cost cost_;
  double begun_ = 0;  // start of this step, in seconds
};

void measure(int ranks, int tensors, bool batched) {
  std::mt19937_64 random(static_cast<uint64_t>(ranks));
  World world(ranks, tensors, batched);
  std::vector<Cost> costs;
  for (int step = 0; step < kSteps; ++step) costs.push_back(world.step(random));
  std::ranges::sort(costs, {}, &Cost::cpu_ns);
  const Cost& cost = costs[costs.size() / 2];
  std::printf("%6d %6d  %-10s %9ld %9ld %10.1f %8.1f %8.3f\n", ranks, ranks / kRanksPerHost,
              batched ? "batches" : "one by one", static_cast<long>(cost.messages),
              static_cast<long>(cost.most), static_cast<double>(cost.bytes) / 1e3,
              static_cast<double>(cost.entry_bytes) / 1e3, static_cast<double>(cost.cpu_ns) / 1e6);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const int tensors = argc > 1 ? std::atoi(argv[1]) : 1000;
  std::printf("%d tensors a step, %d ranks a host; medians of %d steps\n", tensors, kRanksPerHost,
              kSteps);
  std::printf("%6s %6s  %-10s %9s %9s %10s %8s %8s\n", "ranks", "hosts", "step", "messages",
              "a leader", "KB in", "KB log", "CPU ms");
  std::vector<int> sizes{8, 64, 512, 4096, 16384};
  if (argc > 2) sizes.clear();
  for (int i = 2; i < argc; ++i) sizes.push_back(std::atoi(argv[i]));
  for (int ranks : sizes) {
    if (ranks <= 512) measure(ranks, tensors, false);
    measure(ranks, tensors, true);
  }
}
