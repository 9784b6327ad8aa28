// SPDX-License-Identifier: Apache-2.0
// The coordinator, rule by rule: those that the simulator's oracle does not know. Here sums of floats; the others are in
// coordinator_*_test.cc.
#include "control/coordinator/coordinator_harness.h"

namespace farandole {

TEST(tiny_payloads_are_reduced_in_rank_order) {
  // In float32 the order shows: ((1e8 - 1e8) + 1) + 1e-8 is not (1e8 + 1e-8) + ...
  std::vector<std::vector<float>> inputs = {{1e8f, 3}, {-1e8f, 5}, {1, 7}, {1e-8f, 11}};
  for (std::vector<Rank> order : {std::vector<Rank>{0, 1, 2, 3}, {3, 1, 0, 2}, {2, 3, 1, 0}}) {
    Job job(4);
    for (Rank r : order) {
      job.submit(r, tensor("x", {2}), payload(inputs[static_cast<size_t>(r)]));
    }
    Log log = job.publish();
    CHECK_EQ(kinds(log), "define result");
    auto sums = values_of<float>(only<Result>(log).payload);
    CHECK_EQ(sums[0], ((1e8f + -1e8f) + 1.0f) + 1e-8f);
    CHECK_EQ(sums[1], 26.0f);
  }
}

TEST(tiny_averages_take_factors_and_skip_absent_ranks) {
  Job job(3);
  Request x = tensor("x", {1});
  x.signature.reduce_op = ReduceOp::kAverage;
  x.signature.prescale = 2;
  x.signature.postscale = 10;
  job.submit(0, x, payload<float>({4}));
  job.submit(1, x, no_input());
  job.submit(2, x, payload<float>({5}));
  Result result = only<Result>(job.publish());
  CHECK(!result.absent);
  CHECK_EQ(values_of<float>(result.payload)[0], 60.0f);  // 10 * (2*4 + 2*5) / 3
}

}  // namespace farandole
