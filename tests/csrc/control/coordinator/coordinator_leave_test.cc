// SPDX-License-Identifier: Apache-2.0
// The coordinator, rule by rule: ranks that leave, fail, or die.
#include <limits>

#include "control/coordinator/coordinator_harness.h"

namespace farandole {

TEST(a_rank_that_leaves_normally_fails_what_needs_it) {
  Job job(3);
  SetId others = job.add_set({0, 1});
  Log log = job.play("*+complete 0+waits 0+ 2/");
  CHECK_EQ(kinds(log), "fail fail define run");
  for (const Fail& fail : all<Fail>(log)) {
    CHECK(fail.failure.code == ErrorCode::kPeer);
    contains(fail.failure.text, "rank 2 finished normally and left");
  }
  CHECK_EQ(kinds(job.play("1+waits 1!refused")), "fail fail");
  for (Rank r : {0, 1}) job.submit(r, in_set(tensor("x"), others));  // not its business
  CHECK_EQ(only<Run>(job.publish()).set, others);
}

// The first leave ends joins, also that of a rank that has not read it yet: so it counts as joined for nothing.
TEST(a_join_that_crosses_a_leave_keeps_its_rank_out_of_no_set) {
  Job job(3);
  CHECK_EQ(only<Joined>(job.play("0. 2/")).last, 0);
  job.report(1, Join{kWorldSet});  // which the entry above has ended there
  for (Rank r : {0, 1}) job.submit(r, form_set_of({0, 1}, "set"), no_input());
  CHECK(only<OpenSet>(job.publish()).ranks == std::vector<Rank>{0, 1});
}

TEST(what_a_rank_refused_before_it_left_is_told) {
  for (const std::string name : {"x", ""}) {
    Job job(3);
    CHECK_EQ(kinds(job.play("0+" + name + " 2!" + name)), "");
    const Failure failure = only<Fail>(job.play("2/")).failure;
    CHECK(failure.code == ErrorCode::kWrongType);
    CHECK_EQ(failure.text, "bad");
    contains(only<Fail>(job.play("1+" + name)).failure.text, "rank 2 finished normally and left");
  }
}

TEST(a_rank_that_leaves_in_failure_aborts_the_job) {
  Job job(3);
  job.submit_all(tensor("x"));
  job.report(1, Leave{true, "ValueError: no data", false});
  const Log log = job.publish();
  CHECK_EQ(kinds(log), "abort");
  CHECK(only<Abort>(log).failure.code == ErrorCode::kPeer);
  contains(only<Abort>(log).failure.text, "rank 1 left: ValueError: no data");
  CHECK_EQ(kinds(job.play("0+x 0.")), "");  // late, and of no consequence
  for (Rank r : {0, 2}) job.report(r, Leave{true, "because of rank 1", false});
  CHECK_EQ(kinds(job.publish()), "stop");
}

TEST(a_rank_that_has_left_tells_why_it_fails) {
  for (bool waited : {true, false}) {
    Job job(3);
    CHECK_EQ(kinds(job.play("1/")), "");
    job.report(1, Leave{true, "a reason", waited});
    const Failure failure = only<Abort>(job.publish()).failure;
    CHECK(failure.code == (waited ? ErrorCode::kStall : ErrorCode::kPeer));
    contains(failure.text, waited ? "waited for ranks 0, 2 to leave, then gave up: a reason"
                                  : "rank 1 left: a reason");
  }
}

TEST(a_lost_rank_aborts_the_job_once) {
  Job job(2);
  job.submit(0, tensor("x"));
  job.coordinator().lose(1, {ErrorCode::kPeer, "rank 1 was killed by signal 9"});
  job.coordinator().lose(1, {ErrorCode::kPeer, "again"});
  CHECK_EQ(only<Abort>(job.publish()).failure.text, "rank 1 was killed by signal 9");
  CHECK_EQ(job.coordinator().next_tick(), std::numeric_limits<int64_t>::max());
  CHECK_EQ(kinds(job.tick(1000)), "");
  CHECK_EQ(kinds(job.play("0/")), "stop");
}

TEST(the_log_stops_when_all_have_left) {
  Job job(3);
  for (const char* leaves : {"1/", "0/"}) CHECK_EQ(kinds(job.play(leaves)), "");
  CHECK_EQ(kinds(job.play("2/")), "stop");
  job.coordinator().lose(0, {ErrorCode::kPeer, "its process has ended"});
  CHECK_EQ(kinds(job.publish()), "");
}

}  // namespace farandole
