// SPDX-License-Identifier: Apache-2.0
// Prediction in real ranks: training loops, and what disturbs them.
#include <string>
#include <vector>

#include "runtime_ranks.h"

namespace farandole::check {
namespace {

constexpr int kSteps = 12;

// One step of training: gradients of several sizes, some of them tiny, all in flight at once.
void train(TestRank& self, int step, int tensors, bool backwards) {
  std::vector<Floats> data;
  for (int t = 0; t < tensors; ++t) {
    size_t n = t % 3 == 0 ? 5 : 300 + 100 * static_cast<size_t>(t);
    data.push_back(values_of(self.rank + step, n));
  }
  std::vector<Handle> handles;
  for (int i = 0; i < tensors; ++i) {
    int t = backwards ? tensors - 1 - i : i;
    handles.push_back(
        self.submit(allreduce(data[static_cast<size_t>(t)], "grad." + std::to_string(t))));
  }
  self.finish(handles);
  for (const Floats& got : data) {
    Floats sum(got.size());
    for (int r = 0; r < self.size; ++r) {
      Floats one = values_of(r + step, got.size());
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += one[i];
    }
    CHECK(got == sum);
  }
}

}  // namespace

TEST(training_loops_agree_with_and_without_prediction) {
  for (int64_t predictions : {0, 1, 4}) {
    run_jobs(
        {1, 2, 3},
        [](TestRank& self) {
          for (int step = 0; step < kSteps; ++step) {
            train(self, step, 9, step % 5 == self.rank);  // mostly in one order
          }
        },
        [&](Config& config) { config.predictions = predictions; });
  }
}

// In the middle of a prediction a rank waits for a part of it, or asks whether it is done.
TEST(a_wait_in_the_middle_of_a_step_gets_its_tensor) {
  run_jobs(
      {2, 3},
      [](TestRank& self) {
        for (int step = 0; step < 2 * kSteps; ++step) {
          Floats a = values_of(self.rank, 400), b = values_of(self.rank, 700);
          Handle first = self.submit(allreduce(a, "a"));
          if (step % 6 == 5) {
            const Deadline deadline = patience();
            while (self.rank == 0 && !self.runtime()->waiter().done(first))
              CHECK(!deadline.expired());
            if (self.rank > 0) self.finish(first);
            CHECK(a == sum_over(self.size, 400));
          }
          Handle second = self.submit(allreduce(b, "b"));
          self.finish(second);
          if (step % 6 != 5 || self.rank == 0) self.finish(first);
          CHECK(a == sum_over(self.size, 400) && b == sum_over(self.size, 700));
        }
      },
      [](Config& config) { config.predictions = 1; });
}

// Rank 1 goes on when rank 0 tells it to, by other means than ours, and rank 0 has to wait first.
TEST(ranks_that_also_wait_for_each_other_elsewhere_go_on) {
  run_jobs(
      {2},
      [](TestRank& self) {
        for (int step = 0; step < 6; ++step) train(self, step, 2, false);
        Floats a = values_of(self.rank, 5), b = values_of(self.rank, 400);
        Handle first = self.submit(allreduce(a, "grad.0"));
        Handle second = 0;
        if (self.rank == 0) {
          second = self.submit(allreduce(b, "grad.1"));
          self.finish(first);
          self.bootstrap.tell(1);
        } else {
          self.bootstrap.await(1, 1);
          second = self.submit(allreduce(b, "grad.1"));
          self.finish(first);
        }
        self.finish(second);
        CHECK(a == sum_over(2, 5) && b == sum_over(2, 400));
      },
      [](Config& config) { config.predictions = 1; });
}

TEST(irregular_calls_do_not_break_a_predicted_loop) {
  run_jobs(
      {2, 3},
      [](TestRank& self) {
        for (int round = 0; round < 3; ++round) {
          for (int step = 0; step < 5; ++step) train(self, step, 6, false);
          // A changed shape on one rank fails on all, and only that call.
          Floats odd = values_of(self.rank, 700 + (self.rank == 0 ? 1 : 0));
          Handle one = self.submit(allreduce(odd, "grad.4"));
          Floats even = values_of(self.rank, 400);
          Handle other = self.submit(allreduce(even, "grad.1"));
          CHECK_EQ(self.wait({one}).code, ErrorCode::kMismatch);
          self.finish(other);
          CHECK(even == sum_over(self.size, 400));
          for (int step = 0; step < 5; ++step) train(self, step, 6, false);
          Ask join;
          join.op = FARANDOLE_JOIN;
          self.run(join);
        }
      },
      [](Config& config) { config.predictions = 2; });
}

}  // namespace farandole::check
