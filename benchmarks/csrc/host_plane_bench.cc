// SPDX-License-Identifier: Apache-2.0
// The host plane alone: forked ranks, in-place float32 averages, driven as the engine does. Results are checked.
// host_plane_bench RANKS [BLOCK_KIB SLOTS DIRECT_BYTES SPIN_US [LARGEST_MIB]]
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
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

constexpr size_t kBellsRoom = 4096;

class Rank {
 public:
  Rank(const Options& options, const Segment& segment, int rank)
      : options_(options), rank_(rank), bells_(bells(options, segment)), plane_(setup(segment)) {}

  void run(std::span<const Part> parts) {
    plane_.begin(parts);
    for (;;) {
      const Progress progress = plane_.step();
      if (progress == Progress::kFinished) return;
      if (progress == Progress::kWaiting) wait();
    }
  }

 private:
  static std::vector<EventCount*> bells(const Options& options, const Segment& segment) {
    std::vector<EventCount*> bells;
    for (int rank = 0; rank < options.ranks; ++rank) {
      bells.push_back(reinterpret_cast<EventCount*>(segment.data()) + rank);
    }
    return bells;
  }

  HostPlane::Setup setup(const Segment& segment) const {
    return {rank_,
            options_.ranks,
            segment.data() + kBellsRoom,
            segment.size() - kBellsRoom,
            bells_,
            options_.block_bytes,
            options_.slots,
            options_.direct_bytes};
  }

  void wait() {
    const int64_t until = now_ns() + options_.spin_ns;
    while (options_.spin_ns > 0 && now_ns() < until) {
      if (plane_.ready()) return;
      ::sched_yield();
    }
    EventCount& bell = *bells_[static_cast<size_t>(rank_)];
    const uint32_t ticket = bell.prepare();
    if (plane_.ready()) return;
    bell.wait(Sleeper::kCaller, ticket, [&] { return plane_.ready(); }, Deadline::never());
  }

  const Options& options_;
  const int rank_;
  const std::vector<EventCount*> bells_;
  HostPlane plane_;
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

void report(size_t bytes, size_t tensors, std::vector<int64_t> times) {
  std::sort(times.begin(), times.end());
  const auto us = [&](size_t i) { return static_cast<double>(times[i]) / 1e3; };
  const double median = us(times.size() / 2);
  std::printf("%11zu B %5zu tensors  min %10.1f us  median %10.1f us  %6.2f GB/s\n", bytes, tensors,
              us(0), median, static_cast<double>(bytes) / median / 1e3);
  std::fflush(stdout);
}

// Small ones are repeated back to back, since a barrier leaves the ranks further apart than they take.
void measure(Rank& rank, int number, const Options& options, std::vector<float>& values,
             size_t bytes, size_t tensors) {
  const size_t count = bytes / sizeof(float);
  const std::vector<Part> parts = parts_in(values, count, tensors, options.ranks);
  Part barrier;
  barrier.signature.op = Op::kBarrier;
  const int inner = bytes <= 65536 ? 20 : 1;
  const int repeats = bytes <= 65536              ? 200
                      : bytes <= size_t{1} << 20  ? 300
                      : bytes <= size_t{16} << 20 ? 40
                                                  : 9;
  std::vector<int64_t> times;
  for (int i = 0; i < repeats; ++i) {
    for (size_t k = 0; k < count; ++k) values[k] = value(k, number);
    rank.run({&barrier, 1});
    const int64_t start = now_ns();
    for (int k = 0; k < inner; ++k) rank.run(parts);
    times.push_back((now_ns() - start) / inner);
    if (i == 0 || i + 1 == repeats) check(values, count, options);
  }
  if (number == 0) report(bytes, tensors, std::move(times));
}

int run_rank(const Options& options, const Segment& segment, int number) {
  Rank rank(options, segment, number);
  std::vector<float> values(options.largest / sizeof(float));
  for (size_t bytes : {size_t{4}, size_t{1} << 10, size_t{8} << 10, size_t{64} << 10,
                       size_t{1} << 20, size_t{16} << 20, size_t{64} << 20, size_t{256} << 20}) {
    if (bytes <= options.largest) measure(rank, number, options, values, bytes, 1);
  }
  measure(rank, number, options, values, size_t{1000} << 10, 1000);
  measure(rank, number, options, values, 4000, 1000);
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
      kBellsRoom + HostPlane::bytes_needed(options.ranks, options.block_bytes, options.slots),
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
