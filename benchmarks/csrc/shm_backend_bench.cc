// SPDX-License-Identifier: Apache-2.0
// Measures the shared-memory backend alone: forked ranks average float32 in place, as driven by the engine.
// Buffers are private, and then staged, or mapped by all ranks. Results are checked.
// shm_backend_bench RANKS [BLOCK_KIB SLOTS DIRECT_BYTES SPIN_US [LARGEST_MIB]]
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "data/shm/host_arenas.h"
#include "data/shm/shm_backend.h"
#include "lib/ipc/event_count.h"
#include "lib/ipc/segment.h"
#include "ranks.h"

namespace {

using namespace farandole;

struct Options {
  int ranks = 2;
  size_t block_bytes = ShmSetup::kBlockBytes;
  int slots = ShmSetup::kSlots;
  size_t direct_bytes = ShmSetup::kDirectBytes;
  int64_t spin_ns = 50'000;
  size_t largest = size_t{256} << 20;
};

constexpr size_t kBellsRoom = 4096;  // and the arenas' directory

// Created before the ranks fork.
struct World {
  explicit World(const Options& options)
      : segment(Segment::create(
            "bench",
            2 * kBellsRoom +
                ShmBackend::sizes(options.ranks, options.block_bytes, options.slots).bytes,
            /*inherit=*/true)) {
    for (int rank = 0; rank < options.ranks; ++rank) {
      arenas.push_back(std::make_shared<Arena>());
      locals.push_back(rank);
    }
  }
  HostArenas open(int rank) const {
    std::vector<Fd> fds;
    for (const auto& arena : arenas) fds.emplace_back(::dup(arena->fd()));
    return HostArenas(arenas[static_cast<size_t>(rank)], rank, std::move(fds),
                      ArenaDirectory(segment.data() + kBellsRoom, static_cast<int>(arenas.size())));
  }
  Segment segment;
  std::vector<std::shared_ptr<Arena>> arenas;
  std::vector<int> locals;
};

class Rank {
 public:
  Rank(const Options& options, const World& world, int rank)
      : options_(options),
        rank_(rank),
        wakeups_(wakeups(options, world.segment)),
        arenas_(world.open(rank)),
        backend_(setup(world)) {}

  void run(std::span<const Part> parts) {
    backend_.begin(parts);
    for (;;) {
      const Progress progress = backend_.step();
      if (progress == Progress::kFinished) return;
      if (progress == Progress::kWaiting) wait();
    }
  }

 private:
  static std::vector<Wakeup> wakeups(const Options& options, const Segment& segment) {
    std::vector<Wakeup> wakeups;
    for (int rank = 0; rank < options.ranks; ++rank) {
      wakeups.emplace_back(reinterpret_cast<EventCount*>(segment.data())[rank]);
    }
    return wakeups;
  }

  ShmSetup setup(const World& world) {
    return {.member = rank_,
            .members = options_.ranks,
            .memory = world.segment.data() + 2 * kBellsRoom,
            .bytes = world.segment.size() - 2 * kBellsRoom,
            .wakeups = wakeups_,
            .block_bytes = options_.block_bytes,
            .slots = options_.slots,
            .direct_bytes = options_.direct_bytes,
            .arenas = &arenas_,
            .locals = world.locals};
  }

  void wait() {
    const int64_t until = now_ns() + options_.spin_ns;
    while (options_.spin_ns > 0 && now_ns() < until) {
      if (backend_.ready()) return;
      ::sched_yield();
    }
    Wakeup wakeup = wakeups_[static_cast<size_t>(rank_)];
    const uint32_t ticket = wakeup.prepare();
    if (backend_.ready()) return;
    wakeup.wait(Sleeper::kCaller, ticket, [&] { return backend_.ready(); }, Deadline::never());
  }

  const Options& options_;
  const int rank_;
  const std::vector<Wakeup> wakeups_;
  HostArenas arenas_;
  ShmBackend backend_;
};

float value(size_t i, int rank) { return static_cast<float>(i % 1021) + static_cast<float>(rank); }

// An average of averages is the same average, so calls may repeat without new values.
void check(std::span<const float> values, size_t count, const Options& options) {
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

// `tensors` equal tensors, in place, next to each other.
std::vector<Part> parts_in(std::span<float> values, size_t count, size_t tensors, int ranks) {
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

void report(const char* where, size_t bytes, size_t tensors, std::vector<int64_t> times) {
  const double least = bench::quantile_us(times, 0), median = bench::quantile_us(times, 0.5);
  std::printf("%11zu B %5zu tensors  %-7s  min %10.1f us  median %10.1f us  %6.2f GB/s\n", bytes,
              tensors, where, least, median, static_cast<double>(bytes) / median / 1e3);
  std::fflush(stdout);
}

// Repeats small calls back to back: after a barrier, ranks are further apart than such a call takes.
void measure(Rank& rank, int number, const Options& options, const char* where,
             std::span<float> values, size_t bytes, size_t tensors) {
  const size_t count = bytes / sizeof(float);
  const std::vector<Part> parts = parts_in(values, count, tensors, options.ranks);
  Part barrier;  // a tiny allreduce, which ends once all ranks have arrived
  const float word = 0;
  barrier.signature.shape = {1};
  barrier.input = reinterpret_cast<const std::byte*>(&word);
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
  if (number == 0) report(where, bytes, tensors, std::move(times));
}

int run_rank(const Options& options, const World& world, int number) {
  Rank rank(options, world, number);
  std::vector<float> heap(options.largest / sizeof(float));
  auto* const mapped = reinterpret_cast<float*>(
      world.arenas[static_cast<size_t>(number)]->allocate(options.largest));
  const auto both = [&](size_t bytes, size_t tensors) {
    if (bytes > options.largest) return;
    measure(rank, number, options, "private", heap, bytes, tensors);
    measure(rank, number, options, "mapped", {mapped, heap.size()}, bytes, tensors);
  };
  for (size_t bytes : {size_t{4}, size_t{1} << 10, size_t{8} << 10, size_t{64} << 10,
                       size_t{1} << 20, size_t{16} << 20, size_t{64} << 20, size_t{256} << 20}) {
    both(bytes, 1);
  }
  both(size_t{1000} << 10, 1000);
  both(4000, 1000);
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
  const World world(options);
  const auto rank = [&](int number) { return run_rank(options, world, number); };
  return bench::run_ranks(options.ranks, rank) ? 0 : 1;
}
