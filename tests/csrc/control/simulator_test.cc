// SPDX-License-Identifier: Apache-2.0
// Random programs, thousands of them. `simulator_test --seed N --ranks R` repeats one and prints its
// messages; `--seeds N` and `--jobs N` run more or fewer.
#include "control/simulator/simulator.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "check.h"

// Present in programs built with a sanitizer only.
extern "C" {
[[gnu::weak]] void __asan_init();
[[gnu::weak]] void __tsan_init();
}

namespace farandole::simulation {
namespace {

constexpr Outcome kOutcomes[] = {kDone,    kAbsent,   kMismatched, kInvalid,
                                 kRefused, kPeerGone, kStalled,    kSkipped};

// Sanitizers cost a factor of five.
int scaled(int seeds) { return __asan_init || __tsan_init ? seeds / 5 + 1 : seeds; }

Statistics run_one(uint64_t seed, int ranks, bool trace) {
  try {
    Program program = plan(seed, ranks);
    return Simulator(program, seed, trace).run();
  } catch (...) {
    std::fprintf(stderr, "repeat with: simulator_test --seed %lu --ranks %d\n",
                 static_cast<unsigned long>(seed), ranks);
    throw;
  }
}

// An elastic job: ranks die at any moment, several in one world; those that live begin the next world, with
// some that join, and with a coordinator, ids and a log of its own, as the core is started anew.
Statistics run_job(uint64_t seed, bool trace) {
  check::Random random(seed ^ 0xe1a5);
  Statistics all;
  int size = random.between(2, 8);
  for (uint64_t world = 1; world <= 4; ++world) {
    try {
      const uint64_t number = seed * 8 + world;
      Program program = plan(number, size, true);
      Simulator simulator(program, number, trace);
      for (int deaths = random.between(0, size); deaths > 0; --deaths) {
        simulator.doom(random.between(0, size - 1), random.below(600));
      }
      all.add(simulator.run());
      size = std::max(2, simulator.living() + random.between(0, 2));
    } catch (...) {
      std::fprintf(stderr, "repeat with: simulator_test --job %lu (world %lu of %d ranks)\n",
                   static_cast<unsigned long>(seed), static_cast<unsigned long>(world), size);
      throw;
    }
  }
  return all;
}

// Runs the seeds, or the one that was asked for.
void run_seeds(int first, int count, const std::function<int(check::Random&)>& ranks_of) {
  std::string only = check::option("seed");
  if (!only.empty()) {
    std::string ranks = check::option("ranks");
    if (ranks.empty()) check::fail("--seed needs --ranks");
    run_one(std::strtoull(only.c_str(), nullptr, 10), std::atoi(ranks.c_str()), true);
    return;
  }
  Statistics all;
  for (int seed = first; seed < first + count; ++seed) {
    check::Random random(static_cast<uint64_t>(seed) + 77);
    all.add(run_one(static_cast<uint64_t>(seed), ranks_of(random), false));
  }
  std::fprintf(stderr, "     %d seeds: %ld reports, %ld entries, %ld buckets, %ld forgotten ids\n",
               count, static_cast<long>(all.reports), static_cast<long>(all.entries),
               static_cast<long>(all.buckets), static_cast<long>(all.forgotten));
  std::fprintf(stderr, "     %ld reports of whole hosts, and %ld of hosts below hosts\n",
               static_cast<long>(all.group_reports), static_cast<long>(all.nested_reports));
  std::fprintf(stderr, "     %ld batches\n", static_cast<long>(all.batches));
  constexpr const char* kNames[] = {"done",    "absent",    "mismatch", "invalid",
                                    "refused", "peer gone", "stalled",  "skipped"};
  for (size_t i = 0; i < std::size(kNames); ++i) {
    std::fprintf(stderr, "     %s %ld\n", kNames[i], static_cast<long>(all.ends[kOutcomes[i]]));
    CHECK(count < 200 || all.ends[kOutcomes[i]] > count / 20);  // else the programs test too little
  }
  CHECK(count < 200 || (all.duplicates > 0 && all.forgotten > 0 && all.notices > 0));
  CHECK(count < 200 || (all.batches > count && all.group_reports > count));
  CHECK(count < 200 || all.nested_reports > count / 20);
}

}  // namespace

TEST(small_worlds) {
  std::string asked = check::option("seeds");
  int seeds = asked.empty() ? scaled(10'000) : std::atoi(asked.c_str());
  run_seeds(0, seeds, [](check::Random& random) {
    double kind = random.unit();
    return kind < 0.5 ? random.between(2, 4) : random.between(5, kind < 0.85 ? 8 : 16);
  });
}

TEST(worlds_of_elastic_jobs) {
  if (!check::option("seed").empty()) return;
  if (std::string job = check::option("job"); !job.empty()) {
    run_job(std::strtoull(job.c_str(), nullptr, 10), true);
    return;
  }
  const std::string asked = check::option("jobs");
  const int jobs = asked.empty() ? scaled(1'000) : std::atoi(asked.c_str());
  Statistics all;
  for (int job = 0; job < jobs; ++job) all.add(run_job(static_cast<uint64_t>(job), false));
  std::fprintf(stderr, "     %d jobs of 4 worlds: %ld deaths, %ld calls done, %ld failed by them\n",
               jobs, static_cast<long>(all.deaths), static_cast<long>(all.ends[kDone]),
               static_cast<long>(all.ends[kPeerGone]));
  CHECK(jobs < 200 || (all.deaths > jobs && all.ends[kPeerGone] > jobs && all.ends[kDone] > jobs));
}

TEST(large_worlds) {
  if (!check::option("seed").empty()) return;
  run_seeds(100'000, scaled(20), [](check::Random& random) { return 256 << random.below(3); });
}

TEST(huge_worlds) {
  if (!check::option("seed").empty()) return;
  run_seeds(200'000, scaled(2), [](check::Random&) { return 4096; });
}

}  // namespace farandole::simulation
