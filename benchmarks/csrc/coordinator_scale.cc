// SPDX-License-Identifier: Apache-2.0
// What negotiation costs rank 0: messages, bytes and CPU time of one training step whose gradients become
// ready in reverse order, each rank's with 5 % lognormal jitter. One report per rank and tensor, no
// leaders in between. `coordinator_scale [RANKS ...]` prints a table.
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "control/coordinator/coordinator.h"

namespace {

using namespace farandole;

constexpr int kTensors = 1000;
constexpr int kSteps = 6;               // the first one defines, the others are alike
constexpr double kStepSeconds = 0.1;    // from the first gradient to the last
constexpr double kJitter = 0.05;        // of each gradient's time
constexpr double kDrainSeconds = 1e-4;  // what comes in this time is one batch
constexpr int64_t kElements = 25'600;   // of a gradient: 1,000 of them are a ResNet-50

int64_t cpu_ns() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

struct Arrival {
  float seconds;
  int32_t rank;
  int32_t tensor;
};

// All reports of one step, in the order in which rank 0 sees them.
std::vector<Arrival> arrivals_of(int ranks, std::mt19937_64& random) {
  std::lognormal_distribution<double> jitter(0, kJitter);
  std::vector<Arrival> arrivals;
  arrivals.reserve(static_cast<size_t>(ranks) * kTensors);
  for (int rank = 0; rank < ranks; ++rank) {
    for (int i = 0; i < kTensors; ++i) {
      double seconds = kStepSeconds * (i + 1) / kTensors * jitter(random);
      arrivals.push_back({static_cast<float>(seconds), rank, kTensors - 1 - i});
    }
  }
  std::ranges::sort(arrivals, {}, &Arrival::seconds);
  return arrivals;
}

struct Cost {
  int64_t reports = 0;
  int64_t report_bytes = 0;
  int64_t entries = 0;
  int64_t entry_bytes = 0;  // each rank reads them all
  int64_t buckets = 0;
  int64_t cpu_ns = 0;
};

class Root {
 public:
  explicit Root(int ranks) : coordinator_(settings(ranks)), reports_(kTensors) {
    for (int t = 0; t < kTensors; ++t) learn({0, request_of(t)});
  }

  Cost step(const std::vector<Arrival>& arrivals) {
    cost_ = {};
    double drain = kDrainSeconds;
    batch_.clear();
    for (const Arrival& arrival : arrivals) {
      if (arrival.seconds > drain) {
        serve();
        drain = arrival.seconds + kDrainSeconds;
      }
      batch_.push_back({arrival.rank, &reports_[static_cast<size_t>(arrival.tensor)]});
    }
    for (int i = 0; i < 4; ++i) serve();  // the last buckets' ends
    reports_ = next_;                     // the ranks have read what was defined
    return cost_;
  }

 private:
  struct Message {
    Rank from;
    const ByteString* bytes;
  };

  static Coordinator::Settings settings(int ranks) {
    Coordinator::Settings settings;
    settings.size = ranks;
    return settings;
  }

  static Request request_of(int tensor) {
    Request request{kWorldSet, "DistributedOptimizer.0.grad." + std::to_string(tensor), {}, {}};
    request.signature.shape = {kElements};
    return request;
  }

  // What all ranks report for this request in the next step.
  void learn(const Define& define) {
    Ready ready;
    ready.request = define.request;
    ready.contribution.has_input = true;
    const Report report = define.id == 0 ? Report(ready) : ReadyMany{{define.id}};
    std::string number = define.request.name.substr(define.request.name.rfind('.') + 1);
    ByteString& bytes = next_[std::stoul(number)];
    bytes.clear();
    encode(report, bytes);
    if (define.id == 0) reports_[std::stoul(number)] = bytes;
  }

  // One round of rank 0: everything that has come, then the log.
  void serve() {
    int64_t start = cpu_ns();
    for (const Message& message : batch_) {
      coordinator_.receive(message.from, decode_report(*message.bytes), 0);
      cost_.report_bytes += static_cast<int64_t>(message.bytes->size());
    }
    entries_.clear();
    coordinator_.publish(entries_);
    encoded_.clear();
    for (const Entry& entry : entries_) encode(entry, encoded_);
    cost_.cpu_ns += cpu_ns() - start;
    cost_.reports += std::ssize(batch_);
    cost_.entries += std::ssize(entries_);
    cost_.entry_bytes += std::ssize(encoded_);
    batch_.clear();
    for (const Entry& entry : entries_) read(entry);
  }

  // A bucket is done when the next batch comes.
  void read(const Entry& entry) {
    if (auto* define = std::get_if<Define>(&entry)) learn(*define);
    auto* run = std::get_if<Run>(&entry);
    if (!run) return;
    ++cost_.buckets;
    done_.clear();
    encode(Report(Done{run->set, run->bucket}), done_);
    batch_.push_back({0, &done_});
  }

  Coordinator coordinator_;
  std::vector<ByteString> reports_;  // by tensor: the same bytes from every rank
  std::vector<ByteString> next_ = std::vector<ByteString>(kTensors);
  std::vector<Message> batch_;
  std::vector<Entry> entries_;
  ByteString encoded_;
  ByteString done_;
  Cost cost_;
};

void print(int ranks, const char* step, const Cost& cost) {
  auto reports = static_cast<double>(cost.reports);
  std::printf("%6d  %-6s %9ld %10.2f %9.1f %8ld %8ld %10.1f %9.2f %8.0f\n", ranks, step,
              static_cast<long>(cost.reports), static_cast<double>(cost.report_bytes) / 1e6,
              static_cast<double>(cost.report_bytes) / reports, static_cast<long>(cost.entries),
              static_cast<long>(cost.buckets), static_cast<double>(cost.entry_bytes) / 1e3,
              static_cast<double>(cost.cpu_ns) / 1e6, static_cast<double>(cost.cpu_ns) / reports);
}

void measure(int ranks) {
  std::mt19937_64 random(static_cast<uint64_t>(ranks));
  Root root(ranks);
  std::vector<Cost> steady;
  for (int step = 0; step < kSteps; ++step) {
    Cost cost = root.step(arrivals_of(ranks, random));
    if (step == 0) print(ranks, "first", cost);
    if (step > 0) steady.push_back(cost);
  }
  std::ranges::sort(steady, {}, &Cost::cpu_ns);
  print(ranks, "steady", steady[steady.size() / 2]);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  std::printf("%d tensors a step; bytes of log entries are those that one rank reads\n", kTensors);
  std::printf("%6s  %-6s %9s %10s %9s %8s %8s %10s %9s %8s\n", "ranks", "step", "reports", "MB in",
              "bytes/rep", "entries", "buckets", "KB log", "CPU ms", "ns/rep");
  for (int i = 1; i < argc; ++i) measure(std::atoi(argv[i]));
  for (int ranks : {8, 64, 512, 4096}) {
    if (argc == 1) measure(ranks);
  }
}
