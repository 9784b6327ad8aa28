// SPDX-License-Identifier: Apache-2.0
// The host plane alone: forked ranks, in-place float32 averages, driven as the engine does; staged and pulled
// exchange in turns. Results are checked.
// host_plane_bench RANKS [BLOCK_KIB SLOTS DIRECT_BYTES SPIN_US [LARGEST_MIB]]
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <vector>

#include "core/error.h"
#include "data/host_plane.h"
#include "lib/clock.h"
#include "lib/event_count.h"
#include "lib/segment.h"

namespace {

using namespace farandole;

struct Options {
  int ranks = 2;
  size_t block_bytes = HostPlane::kBlockBytes;
  int slots = HostPlane::kSlots;
  size_t direct_bytes = HostPlane::kDirectBytes;
  int64_t spin_ns = 50'000;
  size_t largest = size_t{256} << 20;
};

constexpr size_t kPidsAt = 2048;  // behind the bells
constexpr size_t kBellsRoom = 4096;

size_t plane_bytes(const Options& options) {
  return HostPlane::bytes_needed(options.ranks, options.block_bytes, options.slots);
}

// One rank with a plane for each exchange.
class Rank {
 public:
  Rank(const Options& options, const Segment& segment, int rank)
      : options_(options), rank_(rank), bells_(bells(options, segment)), staged_(setup(segment, 0)) {
    pids(segment)[rank] = ::getpid();
    barrier();
    HostPlane::Setup with_peers = setup(segment, 1);
    for (int peer = 0; peer < options.ranks; ++peer) {
      with_peers.peers.push_back({peer, pids(segment)[peer]});
    }
    with_peers.pull_bytes = 0;
    pulled_.emplace(with_peers);
    barrier();
  }

  void run(bool pulled, std::span<const Part> parts) {
    HostPlane& plane = pulled ? *pulled_ : staged_;
    plane.begin(parts);
    for (;;) {
      const Progress progress = plane.step();
      if (progress == Progress::kFinished) return;
      if (progress == Progress::kWaiting) wait(plane);
    }
  }

  void barrier() {
    Part barrier;
    barrier.signature.op = Op::kBarrier;
    run(false, {&barrier, 1});
  }

 private:
  static std::vector<EventCount*> bells(const Options& options, const Segment& segment) {
    std::vector<EventCount*> bells;
    for (int rank = 0; rank < options.ranks; ++rank) {
      bells.push_back(reinterpret_cast<EventCount*>(segment.data()) + rank);
    }
    return bells;
  }

  static pid_t* pids(const Segment& segment) {
    return reinterpret_cast<pid_t*>(segment.data() + kPidsAt);
  }

  HostPlane::Setup setup(const Segment& segment, size_t plane) const {
    HostPlane::Setup setup;
    setup.member = rank_;
    setup.members = options_.ranks;
    setup.memory = segment.data() + kBellsRoom + plane * plane_bytes(options_);
    setup.bytes = plane_bytes(options_);
    setup.bells = bells_;
    setup.block_bytes = options_.block_bytes;
    setup.slots = options_.slots;
    setup.direct_bytes = options_.direct_bytes;
    return setup;
  }

  void wait(const HostPlane& plane) {
    const int64_t until = now_ns() + options_.spin_ns;
    while (options_.spin_ns > 0 && now_ns() < until) {
      if (plane.ready()) return;
      ::sched_yield();
    }
    EventCount& bell = *bells_[static_cast<size_t>(rank_)];
    const uint32_t ticket = bell.prepare();
    if (plane.ready()) return;
    bell.wait(Sleeper::kCaller, ticket, [&] { return plane.ready(); }, Deadline::never());
  }

  const Options& options_;
  const int rank_;
  const std::vector<EventCount*> bells_;
  HostPlane staged_;
  std::optional<HostPlane> pulled_;
};

float value(size_t i, int rank) { return static_cast<float>(i % 1021) + static_cast<float>(rank); }

// Averaging an average again changes nothing: it may be repeated without filling in new values.
void check(const std::vector<float>& values, size_t count, const Options& options) {
  for (size_t i = 0; i < count; ++i) {
    float sum = 0;
    for (int rank = 0; rank < options.ranks; ++rank) sum += value(i, rank);
    const float mean = sum / static_cast<float>(options.ranks);
    if (std::abs(values[i] - mean) > 1e-6F * mean) {
      std::fprintf(stderr, "element %zu of %zu is %g, not %g\n", i, count, values[i], mean);
      ::_exit(1);
    }
  }
}

// `tensors` equal ones in place, side by side.
std::vector<Part> parts_in(std::vector<float>& values, size_t count, size_t tensors, int ranks) {
  Part part;
  part.signature.reduce_op = ReduceOp::kAverage;
  part.signature.shape = {static_cast<int64_t>(count / tensors)};
  part.divisor = ranks;
  std::vector<Part> parts(tensors, part);
  for (size_t i = 0; i < tensors; ++i) {
    parts[i].output = reinterpret_cast<std::byte*>(values.data() + i * (count / tensors));
    parts[i].input = parts[i].output;
  }
  return parts;
}

void report(size_t bytes, size_t tensors, std::vector<int64_t> (&times)[2]) {
  double medians[2];
  std::printf("%11zu B %5zu tensors", bytes, tensors);
  for (int pulled : {0, 1}) {
    std::sort(times[pulled].begin(), times[pulled].end());
    medians[pulled] = static_cast<double>(times[pulled][times[pulled].size() / 2]) / 1e3;
    std::printf("  %s min %9.1f median %9.1f us %6.2f GB/s", pulled ? "pulled" : "staged",
                static_cast<double>(times[pulled][0]) / 1e3, medians[pulled],
                static_cast<double>(bytes) / medians[pulled] / 1e3);
  }
  std::printf("  ratio %.2f\n", medians[1] / medians[0]);
  std::fflush(stdout);
}

// Small ones are repeated back to back, since a barrier leaves the ranks further apart than they take.
void measure(Rank& rank, int number, const Options& options, std::vector<float>& values,
             size_t bytes, size_t tensors) {
  const size_t count = bytes / sizeof(float);
  const std::vector<Part> parts = parts_in(values, count, tensors, options.ranks);
  const int inner = bytes <= 65536 ? 20 : 1;
  const int repeats = bytes <= 65536              ? 200
                      : bytes <= size_t{1} << 20  ? 300
                      : bytes <= size_t{16} << 20 ? 40
                                                  : 9;
  std::vector<int64_t> times[2];
  for (int i = 0; i < repeats; ++i) {
    for (bool pulled : {false, true}) {
      for (size_t k = 0; k < count; ++k) values[k] = value(k, number);
      rank.barrier();
      const int64_t start = now_ns();
      for (int k = 0; k < inner; ++k) rank.run(pulled, parts);
      times[pulled].push_back((now_ns() - start) / inner);
      if (i == 0 || i + 1 == repeats) check(values, count, options);
    }
  }
  if (number == 0) report(bytes, tensors, times);
}

int run_rank(const Options& options, const Segment& segment, int number) {
  Rank rank(options, segment, number);
  std::vector<float> values(options.largest / sizeof(float)); if (getenv("X_THP")) { madvise((void*)(((uintptr_t)values.data()+4095)/4096*4096), options.largest-4096, MADV_HUGEPAGE); madvise((void*)(((uintptr_t)values.data()+4095)/4096*4096), options.largest-4096, 25); }
  for (size_t bytes : {size_t{4}, size_t{1} << 10, size_t{8} << 10, size_t{64} << 10,
                       size_t{128} << 10, size_t{256} << 10, size_t{512} << 10, size_t{1} << 20, size_t{16} << 20, size_t{64} << 20, size_t{256} << 20}) {
    if (bytes <= options.largest) measure(rank, number, options, values, bytes, 1);
  }
  measure(rank, number, options, values, size_t{1000} << 10, 1000);
  measure(rank, number, options, values, 4000, 1000);
  measure(rank, number, options, values, size_t{16} << 20, 128);
  return rescued_wakeups() == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  const auto argument = [&](int i, auto fallback) {
    return argc > i ? static_cast<decltype(fallback)>(std::atoll(argv[i])) : fallback;
  };
  options.ranks = argument(1, options.ranks);
  options.block_bytes = argument(2, options.block_bytes / 1024) * 1024;
  options.slots = argument(3, options.slots);
  options.direct_bytes = argument(4, options.direct_bytes);
  options.spin_ns = argument(5, options.spin_ns / 1000) * 1000;
  options.largest = argument(6, options.largest >> 20) << 20;
  std::printf("%d ranks, %zu KiB blocks, %d slots, direct up to %zu B, spin %ld us\n",
              options.ranks, options.block_bytes / 1024, options.slots, options.direct_bytes,
              static_cast<long>(options.spin_ns / 1000));
  std::fflush(stdout);
  const Segment segment = Segment::create(
      "bench",
      kBellsRoom + 2 * plane_bytes(options),
      /*inherit=*/true);
  std::vector<pid_t> children;
  for (int number = 1; number < options.ranks; ++number) {
    const pid_t pid = ::fork();
    if (pid == 0) ::_exit(run_rank(options, segment, number));
    children.push_back(pid);
  }
  int failed = run_rank(options, segment, 0);
  for (pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    failed |= status;
  }
  return failed != 0;
}
