// SPDX-License-Identifier: Apache-2.0
// Random programs on whole ranks, thousands of them. `simulation_test small --seed N [--ranks R]` repeats one and prints
// it; `--seeds N` and `--jobs N` run more or fewer, `--first N` begins there (make simulate).
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "base/logging.h"
#include "check.h"
#include "kernels/kernels.h"
#include "runtime/simulation/world.h"

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

Trouble trouble_of(uint64_t seed) {
  check::Random random(seed ^ 0x7b0b1e);
  const double kind = random.unit();
  if (kind < 0.6) return Trouble::kLittle;
  if (kind < 0.7) return Trouble::kHunger;
  return kind < 0.82 ? Trouble::kStop : kind < 0.9 ? Trouble::kCut : Trouble::kSilence;
}

Statistics run_one(uint64_t seed, int ranks, bool trace) {
  try {
    const auto& program = *new Program(plan(seed, ranks, trouble_of(seed)));
    auto* world = new World(program, seed, trace);  // one that fails stays: its threads are asleep
    const Statistics all = world->run();
    delete world;
    delete &program;
    return all;
  } catch (...) {
    std::fprintf(stderr, "repeat with: make simulate SEED=%lu RANKS=%d\n",
                 static_cast<unsigned long>(seed), ranks);
    throw;
  }
}

// An elastic job: ranks die at any moment, several in one world; those that live begin the next world, with some that
// join.
Statistics run_job(uint64_t seed, bool trace) {
  check::Random random(seed ^ 0xe1a5);
  Statistics all;
  int size = random.between(2, 8);
  for (uint64_t world = 1; world <= 4; ++world) {
    try {
      const uint64_t number = seed * 8 + world;
      const Program& program = *new Program(plan(number, size, Trouble::kDeaths));
      World& one = *new World(program, number, trace);
      for (int deaths = random.between(0, size); deaths > 0; --deaths) {
        one.doom(random.between(0, size - 1), random.below(4000));
      }
      all.add(one.run());
      size = std::max(2, one.living() + random.between(0, 2));
      delete &one;
      delete &program;
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

// Messages are of interest in one world only.
void set_up(bool trace) {
  kernels::select_target("");
  LogSettings settings;
  settings.level = log_level_of(trace ? "warning" : "fatal");
  set_log(settings);
}

void print(const Statistics& all) {
  constexpr const char* kNames[] = {"done",    "absent",    "mismatch", "invalid",
                                    "refused", "peer gone", "stalled",  "skipped"};
  std::fprintf(stderr,
               "     %ld turns, %ld worlds of several hosts, %ld ranks stopped, %ld links cut, "
               "%ld calls done as they were made\n    ",
               static_cast<long>(all.turns), static_cast<long>(all.several_hosts),
               static_cast<long>(all.stops), static_cast<long>(all.cuts),
               static_cast<long>(all.direct));
  for (size_t i = 0; i < std::size(kNames); ++i)
    std::fprintf(stderr, " %s %ld", kNames[i], static_cast<long>(all.ends[kOutcomes[i]]));
  std::fprintf(stderr, "\n");
}

// Runs seeds, or the one that was asked for.
void run_seeds(int count, const std::function<int(check::Random&)>& ranks_of) {
  set_up(!check::option("seed").empty());
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
  std::fprintf(stderr, "     %d seeds from %lu\n", count, static_cast<unsigned long>(first));
  print(all);
  for (Outcome outcome : kOutcomes) CHECK(count < 2000 || all.ends[outcome] > count / 20);
  CHECK(count < 2000 || (all.duplicates > 0 && all.direct > 5 * count && all.several_hosts > 0));
  CHECK(count < 2000 || (all.stops > count / 20 && all.cuts > count / 20));
}

}  // namespace

TEST(small_worlds) {
  run_seeds(many("seeds", 500), [](check::Random& random) {
    const double kind = random.unit();
    return kind < 0.7 ? random.between(2, 4) : random.between(5, kind < 0.95 ? 8 : 12);
  });
}

TEST(jobs_with_deaths) {
  if (!check::option("seed").empty()) return;
  set_up(!check::option("job").empty());
  if (std::string job = check::option("job"); !job.empty()) {
    run_job(number(job), true);
    return;
  }
  const int jobs = many("jobs", 200);
  Statistics all;
  for (int job = 0; job < jobs; ++job) {
    all.add(run_job(first_seed() + static_cast<uint64_t>(job), false));
  }
  std::fprintf(stderr, "     %d jobs of 4 worlds: %ld deaths, %ld of leaders\n", jobs,
               static_cast<long>(all.deaths), static_cast<long>(all.leaders));
  print(all);
  CHECK(jobs < 200 || (all.deaths > jobs && all.ends[kPeerGone] > jobs && all.ends[kDone] > jobs));
}

TEST(large_worlds) {
  if (!check::option("seed").empty()) return;
  run_seeds(many("large", 2), [](check::Random& random) { return random.chance(0.5) ? 33 : 65; });
}

}  // namespace farandole::simulation
