// SPDX-License-Identifier: Apache-2.0
// Groups: calls of several tensors.
#include "control/coordinator/coordinator_harness.h"

namespace farandole {
namespace {

Request group_of(const std::string& name, size_t tensors, int64_t length = 1000) {
  if (tensors > 0) return grouped(tensor(name, {length}), tensors);
  Request none = with_op(tensor(name, {}), Op::kBarrier);
  none.no_tensors = true;
  return none;
}

}  // namespace

TEST(ranks_that_disagree_about_the_size_of_a_group_hear_all_sizes) {
  for (const char* name : {"g", ""}) {
    Job job(4);
    job.submit(0, group_of(name, 3));
    job.submit(1, group_of(name, 2));
    job.submit(2, group_of(name, 0));
    CHECK_EQ(kinds(job.publish()), "");
    job.submit(3, group_of(name, 3));
    const Fail fail = only<Fail>(job.publish());
    CHECK(fail.failure.code == ErrorCode::kMismatch);
    contains(fail.failure.text, "group size is 3 on ranks 0, 3, 2 on rank 1, 0 on rank 2");
    job.submit_all(group_of(name, 2));
    CHECK_EQ(kinds(job.publish()), "define run");
  }
}

TEST(a_group_of_one_is_a_call_and_of_none_a_barrier) {
  Job job(2);
  job.submit(0, group_of("g", 1));
  CHECK_EQ(kinds(job.play("1+g")), "define run");
  job.submit_all(group_of("none", 0));
  CHECK_EQ(kinds(job.publish()), "define result");
  job.submit(0, group_of("none", 0));
  job.submit(1, with_op(tensor("none", {}), Op::kBarrier));
  contains(only<Fail>(job.publish()).failure.text, "group size is 0 on rank 0, 1 on rank 1");
}

TEST(a_mismatch_names_the_tensor_of_a_group) {
  Job job(2);
  Request odd = group_of("g", 3);
  odd.more[1].shape = {7};
  job.submit(0, group_of("g", 3));
  job.submit(1, odd);
  contains(only<Fail>(job.publish()).failure.text,
           "'g', tensor 3 (allreduce): shape is (1000,) on rank 0, (7,) on rank 1");
}

TEST(a_refused_group_fails_once) {
  for (const char* name : {"g", ""}) {
    Job job(3);
    job.submit(0, group_of(name, 3));
    job.play("2!" + std::string(name));
    job.submit(1, group_of(name, 3));
    CHECK_EQ(only<Fail>(job.publish()).failure.text, "bad");
  }
}

TEST(each_tensor_of_a_group_has_its_own_inputs) {
  Job job(2);
  Ready ready{0, group_of("g", 3), 0, input(), {no_input(), no_input()}};
  job.report(0, ready);
  ready.more[0] = input();
  job.report(1, ready);
  const Run run = only<Run>(job.publish());
  CHECK_EQ(run.items.size(), size_t{1});
  CHECK(run.items[0].part(0).plain());
  CHECK(run.items[0].part(1).absent == std::vector<int32_t>({0}));
  CHECK(run.items[0].part(2).absent == std::vector<int32_t>({0, 1}));
  job.submit_all(group_of("g", 3), no_input());
  CHECK(only<Result>(job.publish()).absent);
}

TEST(a_large_group_moves_in_one_bucket) {
  Coordinator::Settings settings = Job::settings(2);
  settings.fusion_bytes = 4096;
  Job job(settings);
  job.submit_all(tensor("before"));
  job.submit_all(group_of("g", 5));
  CHECK_EQ(kinds(job.play("*+after")), "define run define run");
  CHECK_EQ(job.coordinator().definitions(), size_t{3});
}

TEST(inputs_of_a_small_group_ride_along) {
  Job job(2);
  for (Rank rank : {0, 1}) {
    const std::vector<float> one{1.0F + static_cast<float>(rank)}, two{10, 20};
    Request group = group_of("g", 2, 1);
    group.more[0].shape = {2};
    job.report(rank, Ready{0, group, 0, payload(one), {payload(two)}});
  }
  const Result result = only<Result>(job.publish());
  CHECK(values_of<float>(result.payload) == std::vector<float>({3, 20, 40}));
}

TEST(a_host_reports_a_group_as_one) {
  Job job(3);
  const int host = job.host_of_all();
  job.submit_all(group_of("g", 3));
  const uint32_t id = only<Define>(job.publish()).id;
  for (bool joined : {false, true}) {
    if (joined) job.submit(1, group_of("g", 2));  // an irregular call: rank by rank
    ReadyMany all;
    all.ids.add(id);
    job.coordinator().receive_all(host, all, 0);
    CHECK_EQ(kinds(job.publish()), joined ? "fail" : "run");
  }
}

}  // namespace farandole
