// SPDX-License-Identifier: Apache-2.0
// Process sets on GPUs, each with a communicator.
#include "base/error.h"
#include "runtime/gpu_ranks.h"

using namespace farandole;
using namespace farandole::check;

namespace {

using Ranks = std::vector<int64_t>;

Ask in_set(Ask ask, SetId set) {
  ask.set = set;
  return ask;
}

Floats sum_over_set(const Ranks& ranks, size_t n) {
  Floats total(n);
  for (int64_t rank : ranks) {
    const Floats one = values_of(static_cast<int>(rank), n);
    for (size_t i = 0; i < n; ++i) total[i] += one[i];
  }
  return total;
}

// Steps in which each rank sends to its sets in an order of its own.
void train(TestRank& self, UserStream& stream, const std::vector<std::pair<SetId, Ranks>>& sets) {
  for (int step = 0; step < 3; ++step) {
    std::vector<Floats> data(sets.size(), values_of(self.rank, 3000));
    std::vector<Handle> handles;
    for (size_t i = 0; i < sets.size(); ++i) {
      const size_t which = (i + static_cast<size_t>(self.rank)) % sets.size();
      const auto& [set, ranks] = sets[which];
      if (std::ranges::count(ranks, self.rank) == 0) continue;
      handles.push_back(
          self.submit(on_gpu(in_set(allreduce(data[which], "x"), set), self.rank, stream)));
    }
    finish_on(self, stream, handles);
    for (size_t i = 0; i < sets.size(); ++i) {
      const Ranks& ranks = sets[i].second;
      if (std::ranges::count(ranks, self.rank) == 0) continue;
      CHECK(data[i] == sum_over_set(ranks, 3000));
    }
  }
}

void work_in_world(TestRank& self, UserStream& stream) {
  train(self, stream, {{kWorldSet, {0, 1, 2}}});
}

void three_sets(TestRank& self) {
  UserStream stream(self.rank);
  work_in_world(self, stream);
  const SetId low = add_set(self, {0, 1}), odd = add_set(self, {1}), ends = add_set(self, {0, 2});
  train(self, stream, {{low, {0, 1}}, {kWorldSet, {0, 1, 2}}, {ends, {0, 2}}, {odd, {1}}});
}

}  // namespace

TEST(each_set_has_a_communicator_of_its_own) {
  run_gpu_jobs({3}, three_sets);
  run_gpu_jobs({3}, three_sets, [](Config& config) { config.gpu_order = "program"; });
}

TEST(a_set_may_come_before_the_world) {
  run_gpu_jobs({3}, [](TestRank& self) {
    UserStream stream(self.rank);
    const SetId low = add_set(self, {0, 1});
    train(self, stream, {{low, {0, 1}}});
    work_in_world(self, stream);
  });
}
