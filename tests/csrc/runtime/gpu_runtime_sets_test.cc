// SPDX-License-Identifier: Apache-2.0
// Process sets on GPUs: their communicators are parts of the world's where NCCL can split it.
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

void average(TestRank& self, UserStream& stream, SetId set, const Ranks& ranks) {
  if (std::ranges::count(ranks, self.rank) == 0) return;
  Floats data = values_of(self.rank, 3000), mean = sum_over_set(ranks, data.size());
  for (float& one : mean) one /= static_cast<float>(ranks.size());
  Ask ask = in_set(allreduce(data, "mean"), set);
  ask.reduce_op = FARANDOLE_AVERAGE;
  finish_on(self, stream, {self.submit(on_gpu(ask, self.rank, stream))});
  CHECK(data == mean);
}

void average_in_world_and(TestRank& self, const Ranks& ranks) {
  UserStream stream(self.rank);
  average(self, stream, kWorldSet, {0, 1, 2, 3});
  average(self, stream, add_set(self, ranks), ranks);
}

}  // namespace

TEST(sets_are_split_off_the_world) {
  gpu_library().needs_nccl_double();
  gpu_library().splits();
  run_gpu_jobs({3}, three_sets);
  CHECK_EQ(gpu_library().splits(), 2 * 3 * 3);  // seeds, sets, and all ranks of the world
}

TEST(a_set_before_the_world_has_a_communicator_of_its_own) {
  gpu_library().needs_nccl_double();
  gpu_library().splits();
  run_gpu_jobs({3}, [](TestRank& self) {
    UserStream stream(self.rank);
    const SetId low = add_set(self, {0, 1});
    train(self, stream, {{low, {0, 1}}});
    work_in_world(self, stream);
  });
  CHECK_EQ(gpu_library().splits(), 0);
}

// Who is not in the set may never wait for anything again.
TEST(nothing_is_split_in_program_order) {
  gpu_library().needs_nccl_double();
  gpu_library().splits();
  run_gpu_jobs({3}, three_sets, [](Config& config) { config.gpu_order = "program"; });
  CHECK_EQ(gpu_library().splits(), 0);
}

// The double refuses to split with work under way, as NCCL may hang then.
TEST(a_split_waits_for_what_the_world_has_launched) {
  run_gpu_jobs({3}, [](TestRank& self) {
    UserStream stream(self.rank);
    work_in_world(self, stream);
    const SetId low = add_set(self, {0, 1});
    Floats slow = values_of(self.rank, 2000), data = values_of(self.rank, 2000);
    const int gate = gpu_library().gate(stream.get());
    const Handle held = self.submit(on_gpu(allreduce(slow, "slow"), self.rank, stream));
    CHECK(!self.wait({held}));  // launched
    UserStream other(self.rank);
    Handle next = 0;
    if (self.rank < 2) {
      next = self.submit(on_gpu(in_set(allreduce(data, "x"), low), self.rank, other));
    }
    Floats host = values_of(self.rank, 5000);
    self.run(allreduce(host, "host"));  // the log has come past the opening of the set
    gpu_library().open(gate);
    finish_on(self, stream, {held});
    if (next) finish_on(self, other, {next});
    CHECK(slow == sum_over(3, 2000));
    if (self.rank < 2) CHECK(data == sum_over_set({0, 1}, 2000));
  });
}

// A rank whose NCCL refuses leaves with the reason; its peers, those outside the set too, hear it.
TEST(a_split_that_fails_reaches_every_rank) {
  gpu_library().needs_nccl_double();
  run_job(
      Kind::kThreads, 3,
      [](TestRank& self) {
        UserStream stream(self.rank);
        work_in_world(self, stream);
        const SetId low = add_set(self, {0, 1});
        self.bootstrap.barrier();
        if (self.rank == 0) gpu_library().fail("ncclCommSplit", 0, 5);
        self.bootstrap.barrier();
        const SetId set = self.rank < 2 ? low : kWorldSet;
        Floats data = values_of(self.rank, 1000);
        Failure failure;
        try {
          failure =
              self.wait({self.submit(on_gpu(in_set(allreduce(data), set), self.rank, stream))});
        } catch (const Error& error) {
          failure = {error.code(), error.what()};
        }
        CHECK(failure.code == ErrorCode::kLibrary || failure.code == ErrorCode::kPeer);
        CHECK(contains(failure.text, "ncclCommSplit"));
      },
      on_double);
  gpu_library().heal();
  CHECK_EQ(gpu_library().alive(), 0);
}

TEST(on_a_switch_three_members_average_by_plain_sums) {
  gpu_library().needs_nccl_double();
  setenv("GPU_DOUBLE_SWITCH", "1", 1);
  gpu_library().weighted_calls();
  run_gpu_jobs({4}, [](TestRank& self) { average_in_world_and(self, {0, 1, 2}); });
  CHECK_EQ(gpu_library().weighted_calls(), 0);
  run_gpu_jobs({4}, [](TestRank& self) { average_in_world_and(self, {0, 2}); });
  CHECK_EQ(gpu_library().weighted_calls(), 2 * 2);  // seeds, members of the pair
  unsetenv("GPU_DOUBLE_SWITCH");
}
