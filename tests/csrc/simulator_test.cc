// SPDX-License-Identifier: Apache-2.0
// Random programs, thousands of them. `simulator_test --seed N --ranks R` repeats one and prints its
// messages; `--seeds N` runs more or fewer.
#include "simulator/simulator.h"

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
  std::fprintf(stderr, "     %ld reports of whole hosts\n", static_cast<long>(all.group_reports));
  std::fprintf(stderr, "     %ld bundles, published %ld times, reported %ld times, %ld awaited\n",
               static_cast<long>(all.bundles), static_cast<long>(all.bundle_rounds),
               static_cast<long>(all.ready_alls), static_cast<long>(all.awaited_splits));
  constexpr const char* kNames[] = {"done",    "absent",    "mismatch", "invalid",
                                    "refused", "peer gone", "stalled",  "skipped"};
  for (size_t i = 0; i < std::size(kNames); ++i) {
    std::fprintf(stderr, "     %s %ld\n", kNames[i], static_cast<long>(all.ends[kOutcomes[i]]));
    CHECK(count < 200 || all.ends[kOutcomes[i]] > count / 20);  // else the programs test too little
  }
  CHECK(count < 200 || (all.duplicates > 0 && all.forgotten > 0 && all.notices > 0));
  CHECK(count < 200 || (all.bundles > count / 20 && all.bundle_rounds > count / 20));
  CHECK(count < 200 || (all.awaited_splits > count / 100 && all.group_reports > count));
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

TEST(large_worlds) {
  if (!check::option("seed").empty()) return;
  run_seeds(100'000, scaled(20), [](check::Random& random) { return 256 << random.below(3); });
}

TEST(huge_worlds) {
  if (!check::option("seed").empty()) return;
  run_seeds(200'000, scaled(2), [](check::Random&) { return 4096; });
}

}  // namespace farandole::simulation
