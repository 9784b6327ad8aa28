// SPDX-License-Identifier: Apache-2.0
// Random programs, thousands of them. `simulator_test --seed N [--ranks R]` repeats one and prints its messages;
// `--seeds N` and `--jobs N` run more or fewer, `--first N` begins there (make simulate).
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
    std::fprintf(stderr, "repeat with: make simulate SEED=%lu RANKS=%d\n",
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
      std::fprintf(stderr, "repeat with: make simulate JOB=%lu (world %lu of %d ranks)\n",
                   static_cast<unsigned long>(seed), static_cast<unsigned long>(world), size);
      throw;
    }
  }
  return all;
}

uint64_t number(const std::string& text) { return std::strtoull(text.c_str(), nullptr, 10); }

// As many as the option says.
int many(const std::string& name, int usual) {
  const std::string asked = check::option(name);
  return asked.empty() ? scaled(usual) : std::atoi(asked.c_str());
}

uint64_t first_seed() { return number(check::option("first")); }

// Runs seeds, or the one that was asked for.
void run_seeds(int count, const std::function<int(check::Random&)>& ranks_of) {
  const auto size_of = [&](uint64_t seed) {
    check::Random random(seed + 77);
    return ranks_of(random);
  };
  if (const std::string only = check::option("seed"); !only.empty()) {
    const std::string ranks = check::option("ranks");
    run_one(number(only), ranks.empty() ? size_of(number(only)) : std::atoi(ranks.c_str()), true);
    return;
  }
  Statistics all;
  const uint64_t first = first_seed();
  for (uint64_t seed = first; seed < first + static_cast<uint64_t>(count); ++seed) {
    all.add(run_one(seed, size_of(seed), false));
  }
  std::fprintf(stderr,
               "     %d seeds from %lu: %ld reports, %ld entries, %ld buckets, %ld forgotten ids\n",
               count, static_cast<unsigned long>(first), static_cast<long>(all.reports),
               static_cast<long>(all.entries), static_cast<long>(all.buckets),
               static_cast<long>(all.forgotten));
  std::fprintf(stderr, "     %ld reports of whole hosts, and %ld of hosts below hosts\n",
               static_cast<long>(all.group_reports), static_cast<long>(all.nested_reports));
  std::fprintf(stderr, "     %ld batches\n", static_cast<long>(all.batches));
  constexpr const char* kNames[] = {"done",    "absent",    "mismatch", "invalid",
                                    "refused", "peer gone", "stalled",  "skipped"};
  for (size_t i = 0; i < std::size(kNames); ++i) {
    std::fprintf(stderr, "     %s %ld\n", kNames[i], static_cast<long>(all.ends[kOutcomes[i]]));
    CHECK(count < 2000 ||
          all.ends[kOutcomes[i]] > count / 20);  // else the programs test too little
  }
  CHECK(count < 2000 || (all.duplicates > 0 && all.forgotten > 0 && all.notices > 0));
  CHECK(count < 2000 || (all.batches > count && all.group_reports > count));
  CHECK(count < 2000 || all.nested_reports > count / 20);
}

}  // namespace

TEST(small_worlds) {
  run_seeds(many("seeds", 10'000), [](check::Random& random) {
    double kind = random.unit();
    return kind < 0.5 ? random.between(2, 4) : random.between(5, kind < 0.85 ? 8 : 16);
  });
}

TEST(worlds_of_elastic_jobs) {
  if (!check::option("seed").empty()) return;
  if (std::string job = check::option("job"); !job.empty()) {
    run_job(number(job), true);
    return;
  }
  const int jobs = many("jobs", 1'000);
  Statistics all;
  for (int job = 0; job < jobs; ++job) {
    all.add(run_job(first_seed() + static_cast<uint64_t>(job), false));
  }
  std::fprintf(stderr, "     %d jobs of 4 worlds: %ld deaths, %ld calls done, %ld failed by them\n",
               jobs, static_cast<long>(all.deaths), static_cast<long>(all.ends[kDone]),
               static_cast<long>(all.ends[kPeerGone]));
  CHECK(jobs < 200 || (all.deaths > jobs && all.ends[kPeerGone] > jobs && all.ends[kDone] > jobs));
}

TEST(large_worlds) {
  if (!check::option("seed").empty()) return;
  run_seeds(many("large", 20), [](check::Random& random) { return 256 << random.below(3); });
}

TEST(huge_worlds) {
  if (!check::option("seed").empty()) return;
  run_seeds(many("huge", 2), [](check::Random&) { return 4096; });
}

}  // namespace farandole::simulation
