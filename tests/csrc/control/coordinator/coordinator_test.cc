// SPDX-License-Identifier: Apache-2.0
// The coordinator, rule by rule: readiness, ids, results at once. The rest of its rules are in
// coordinator_{agreement,order,sets,leave}_test.cc.
#include "control/coordinator/coordinator_harness.h"

namespace farandole {
TEST(ready_only_when_all_members_have_reported) {
  Job job(4);
  for (Rank r : {2, 0, 3}) {
    job.submit(r, tensor("x"));
    CHECK_EQ(kinds(job.publish()), "");
  }
  job.submit(1, tensor("x"));
  Log log = job.publish();
  CHECK_EQ(kinds(log), "define run");
  Run run = only<Run>(log);
  CHECK_EQ(run.set, kWorldSet);
  CHECK_EQ(run.bucket, 1);
  CHECK_EQ(run.items.size(), 1);
  CHECK_EQ(run.items[0].id, only<Define>(log).id);
  CHECK_EQ(run.items[0].divisor, 1);
  CHECK(run.items[0].absent.empty());
  CHECK_EQ(only<Define>(log).request.name, "x");
  CHECK_EQ(kinds(job.publish()), "");
}

TEST(a_name_is_defined_once) {
  Job job(2);
  job.submit_all(tensor("x"));
  CHECK_EQ(kinds(job.publish()), "define run");
  for (uint64_t step = 1; step < 5; ++step) {
    job.report(0, Done{kWorldSet, step});
    job.submit_all(tensor("x"));
    CHECK_EQ(kinds(job.publish()), "run");
  }
}

TEST(a_changed_request_is_defined_again_under_its_id) {
  Job job(2);
  job.submit_all(tensor("x", {1000}));
  uint32_t id = only<Define>(job.publish()).id;
  job.submit_all(tensor("x", {2000}));
  Define define = only<Define>(job.publish());
  CHECK_EQ(define.id, id);
  CHECK_EQ(define.request.signature.shape[0], 2000);
  CHECK_EQ(job.coordinator().definitions(), 1);
}

TEST(one_rank_with_the_id_and_one_with_the_request_agree) {
  Job job(2);
  job.submit_all(tensor("x"));
  uint32_t id = only<Define>(job.publish()).id;
  job.report(0, Done{kWorldSet, 1});
  for (bool id_first : {true, false}) {
    for (bool by_id : {id_first, !id_first}) {
      Ready ready;
      if (by_id) ready.id = id;
      if (!by_id) ready.request = tensor("x");
      ready.contribution = input();
      job.report(by_id ? 0 : 1, ready);
    }
    CHECK_EQ(kinds(job.publish()), "run");
  }
}

TEST(unnamed_calls_meet_in_their_order) {
  Job job(2);
  for (int64_t n : {1, 2, 3}) job.submit(0, tensor("", {n}));
  for (int64_t n : {1, 2}) job.submit(1, tensor("", {n}));
  Log log = job.publish();
  CHECK_EQ(kinds(log), "define define run");
  Run run = only<Run>(log);
  CHECK_EQ(run.items.size(), 2);
  CHECK_EQ(run.items[0].sequence, 0);
  CHECK_EQ(run.items[1].sequence, 1);
  job.submit(1, tensor("", {3}));
  CHECK_EQ(only<Run>(job.publish()).items[0].sequence, 2);
  job.report(0, Done{kWorldSet, 2});
  job.submit_all(tensor("", {2}));  // a signature seen before: an id
  CHECK_EQ(kinds(job.publish()), "run");
  CHECK_EQ(job.coordinator().definitions(), 3);
}

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

TEST(a_tiny_input_beside_a_large_one_goes_to_the_lane) {
  Job job(2);
  job.submit(0, with_op(tensor("x", {1, 2}), Op::kAllgather), {true, false, 900, {}, {}});
  std::vector<float> small = {1, 2};
  Contribution rides = payload(small);
  rides.rows = 1;
  job.submit(1, with_op(tensor("x", {1, 2}), Op::kAllgather), rides);
  Log log = job.publish();
  CHECK_EQ(kinds(log), "define run");
  CHECK(only<Run>(log).items[0].rows == (std::vector<int64_t>{900, 1}));
}

TEST(a_tiny_allgather_takes_different_rows) {
  Job job(3);
  Request x = with_op(tensor("x", {1, 2}), Op::kAllgather);
  std::vector<float> a = {1, 2, 3, 4}, b = {5, 6};
  Contribution first = payload(a), second = payload(b);
  first.rows = 2;
  second.rows = 1;
  job.submit(2, x, second);
  job.submit(1, x, no_input());
  job.submit(0, x, first);
  Result result = only<Result>(job.publish());
  CHECK(result.rows == (std::vector<int64_t>{2, 0, 1}));
  CHECK(values_of<float>(result.payload) == (std::vector<float>{1, 2, 3, 4, 5, 6}));
}

TEST(a_tiny_broadcast_takes_the_roots_value) {
  Job job(3);
  Request x = with_op(tensor("x", {2}), Op::kBroadcast);
  x.signature.root = 1;
  job.submit(0, x, no_input());
  job.submit(1, x, payload<float>({7, 8}));
  job.submit(2, x, no_input());
  CHECK(values_of<float>(only<Result>(job.publish()).payload) == (std::vector<float>{7, 8}));
}

TEST(a_large_broadcast_has_no_absent_members) {
  Job job(2);
  Request x = with_op(tensor("x"), Op::kBroadcast);
  x.signature.root = 0;
  job.submit(0, x, input());
  job.submit(1, x, no_input());
  CHECK(only<Run>(job.publish()).items[0].absent.empty());
}

TEST(alltoall_gathers_the_whole_matrix) {
  Job job(2);
  Request x = with_op(tensor("x", {1, 300}), Op::kAlltoall);
  job.submit(1, x, {true, false, 3, {3, 0}, {}});
  job.submit(0, x, {true, false, 3, {1, 2}, {}});
  CHECK(only<Run>(job.publish()).items[0].rows == (std::vector<int64_t>{1, 2, 3, 0}));
}

TEST(a_scatter_tells_the_roots_rows_alone) {
  Job job(3);
  Request x = with_op(tensor("x", {1, 300}), Op::kScatter);
  x.signature.root = 1;
  job.submit(2, x, no_input());
  job.submit(1, x, {true, false, 5, {1, 0, 3}, {}});
  job.submit(0, x, no_input());
  const Item item = only<Run>(job.publish()).items[0];
  CHECK(item.rows == (std::vector<int64_t>{1, 0, 3}));
  CHECK(item.absent.empty());
}

TEST(a_barrier_is_done_when_all_are_there) {
  Job job(2);
  Request barrier = with_op(tensor("", {}), Op::kBarrier);
  job.submit(0, barrier, no_input());
  CHECK_EQ(kinds(job.publish()), "");
  job.submit(1, barrier, no_input());
  CHECK_EQ(kinds(job.publish()), "define result");
}

TEST(absent_on_some_is_told_and_absent_on_all_is_a_result) {
  Job job(3);
  for (Rank r : {0, 1, 2}) job.submit(r, tensor("x"), r == 1 ? no_input() : input());
  CHECK(only<Run>(job.publish()).items[0].absent == std::vector<int32_t>{1});
  job.submit_all(tensor("x"), no_input());
  Log log = job.publish();
  CHECK_EQ(kinds(log), "result");
  CHECK(only<Result>(log).absent);
  CHECK(only<Result>(log).payload.empty());
}

}  // namespace farandole
