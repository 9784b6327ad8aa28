// SPDX-License-Identifier: Apache-2.0
// Ranks that report a name again before the call that they have reported under it has ended.
#include "control/coordinator/coordinator_harness.h"

namespace farandole {
namespace {

const Failure kBad{ErrorCode::kWrongType, "bad"};

void refuse(Job& job, Rank rank, const std::string& name = "x") {
  job.report(rank, Refuse{{kWorldSet, name, 0}, kBad});
}

}  // namespace

TEST(a_second_report_is_about_the_next_call) {
  Job job(3);
  refuse(job, 1);
  job.submit(1, tensor("x"));
  job.submit(0, tensor("x"));
  CHECK_EQ(kinds(job.publish()), "");
  job.submit(2, tensor("x"));
  const Fail fail = only<Fail>(job.publish());
  CHECK_EQ(fail.failure.text, "bad");
  CHECK(fail.unheard.empty());
  job.submit(0, tensor("x"));
  job.submit(2, tensor("x"));
  CHECK_EQ(kinds(job.publish()), "define run");
}

TEST(reports_wait_in_their_order) {
  Job job(2);
  refuse(job, 0);
  refuse(job, 0);
  job.submit(0, tensor("x"));
  refuse(job, 0);
  for (int call = 0; call < 2; ++call) {
    job.submit(1, tensor("x"));
    CHECK_EQ(kinds(job.publish()), "fail");
  }
  job.submit(1, tensor("x"));
  CHECK_EQ(kinds(job.publish()), "define run");
  job.submit(1, tensor("x"));
  CHECK_EQ(kinds(job.publish()), "fail");
}

// All calls of one batch: what waited for the first is published with it.
TEST(calls_that_waited_for_each_other_end_in_one_batch) {
  Job job(2);
  for (Rank rank : {0, 1}) {
    refuse(job, rank);
    job.submit(rank, tensor("x"));
  }
  CHECK_EQ(kinds(job.publish()), "fail define run");
}

TEST(a_second_report_by_id_waits) {
  Job job(2);
  job.submit_all(tensor("x"));
  const ReadyMany many{{only<Define>(job.publish()).id}};
  for (int call = 0; call < 2; ++call) job.report(0, many);
  for (uint64_t bucket : {1, 2}) {
    job.report(0, Done{kWorldSet, bucket});
    job.report(1, many);
    CHECK_EQ(kinds(job.publish()), "run");
  }
}

TEST(a_payload_that_waits_is_kept) {
  Job job(2);
  refuse(job, 0);
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
  refuse(job, 0);
  job.submit(0, tensor("x"));
  job.report(0, Join{});
  job.submit(1, tensor("y"));
  CHECK_EQ(kinds(job.publish()), "");  // it has not joined yet
  job.submit(1, tensor("x"));
  job.submit(1, tensor("x"));
  const Log log = job.publish();
  CHECK_EQ(kinds(log), "fail define define run");  // y without rank 0, x with both
  const Run run = only<Run>(log);
  CHECK(run.items[0].inputs.absent == std::vector<int32_t>({0}));
  CHECK(run.items[1].inputs.plain());
  job.report(1, Join{});
  CHECK_EQ(kinds(job.publish()), "joined");
}

TEST(what_waits_for_a_call_that_is_given_up_goes_on) {
  Job job(Job::impatient(3));
  refuse(job, 0);
  job.submit(0, tensor("x"));
  job.at(2);
  const Fail fail = only<Fail>(job.tick());
  CHECK(fail.unheard == std::vector<Rank>({1, 2}));
  job.submit(1, tensor("x"));
  job.submit(2, tensor("x"));
  CHECK_EQ(kinds(job.publish()), "define run");
}

// One entry answers one report of each rank.
TEST(two_reports_that_come_too_late_fail_twice) {
  Job job(3);
  job.report(2, Leave{});
  job.publish();
  refuse(job, 0);
  job.submit(0, tensor("x"));
  job.submit(1, tensor("x"));
  CHECK_EQ(kinds(job.publish()), "fail fail");
}

TEST(a_leaver_does_not_wait_for_what_it_reported_twice) {
  Job job(2);
  refuse(job, 0);
  job.submit(0, tensor("x"));
  job.report(0, Leave{});
  CHECK(only<Fail>(job.publish()).unheard == std::vector<Rank>({1}));
  job.submit(1, tensor("x"));
  CHECK_EQ(kinds(job.publish()), "fail");
}

}  // namespace farandole
