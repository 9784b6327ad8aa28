// SPDX-License-Identifier: Apache-2.0
// Ranks that report a name again before the call that they have reported under it has ended.
#include "control/coordinator/coordinator_harness.h"

namespace farandole {

TEST(a_second_report_is_about_the_next_call) {
  Job job(3);
  CHECK_EQ(kinds(job.play("1!x 1+x 0+x")), "");
  const Fail fail = only<Fail>(job.play("2+x"));
  CHECK_EQ(fail.failure.text, "bad");
  CHECK(fail.unheard.empty());
  CHECK_EQ(kinds(job.play("0+x 2+x")), "define run");
}

TEST(reports_wait_in_their_order) {
  Job job(2);
  CHECK_EQ(kinds(job.play("0!x 0!x 0+x 0!x 1+x")), "fail");
  for (const char* next : {"fail", "define run", "fail"}) CHECK_EQ(kinds(job.play("1+x")), next);
}

// All calls of one batch: what waited for the first is published with it.
TEST(calls_that_waited_for_each_other_end_in_one_batch) {
  CHECK_EQ(kinds(Job(2).play("0!x 0+x 1!x 1+x")), "fail define run");
}

TEST(a_second_report_by_id_waits) {
  Job job(2);
  const ReadyMany many{{only<Define>(job.play("*+x")).id}};
  for (int call = 0; call < 2; ++call) job.report(0, many);
  for (uint64_t bucket : {1, 2}) {
    job.report(0, Done{kWorldSet, bucket});
    job.report(1, many);
    CHECK_EQ(kinds(job.publish()), "run");
  }
}

TEST(a_payload_that_waits_is_kept) {
  Job job(2);
  job.play("0!x");
  {
    const std::vector<float> mine{1, 2};
    job.submit(0, tensor("x", {2}), payload(mine));
  }
  const std::vector<float> theirs{10, 20};
  for (int call = 0; call < 2; ++call) job.submit(1, tensor("x", {2}), payload(theirs));
  const Result result = only<Result>(job.publish());
  CHECK(values_of<float>(result.payload) == std::vector<float>({11, 22}));
}

TEST(a_rank_joins_after_what_it_has_reported) {
  Job job(2);
  CHECK_EQ(kinds(job.play("0!x 0+x 0. 1+y")), "");  // it has not joined yet
  const Log log = job.play("1+x 1+x");
  CHECK_EQ(kinds(log), "fail define define run");  // y without rank 0, x with both
  const Run run = only<Run>(log);
  CHECK(run.items[0].inputs.absent == std::vector<int32_t>({0}));
  CHECK(run.items[1].inputs.plain());
  CHECK_EQ(kinds(job.play("1.")), "joined");
}

TEST(what_waits_for_a_call_that_is_given_up_goes_on) {
  Job job(Job::impatient(3));
  job.play("0!x 0+x");
  CHECK(only<Fail>(job.tick(2)).unheard == std::vector<Rank>({1, 2}));
  CHECK_EQ(kinds(job.play("1+x 2+x")), "define run");
}

// One entry answers one report of each rank.
TEST(two_reports_that_come_too_late_fail_twice) {
  Job job(3);
  job.play("2/");
  CHECK_EQ(kinds(job.play("0!x 0+x 1+x")), "fail fail");
}

TEST(a_leaver_does_not_wait_for_what_it_reported_twice) {
  Job job(2);
  CHECK(only<Fail>(job.play("0!x 0+x 0/")).unheard == std::vector<Rank>({1}));
  CHECK_EQ(kinds(job.play("1+x")), "fail");
}

}  // namespace farandole
