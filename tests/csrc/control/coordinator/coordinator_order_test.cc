// SPDX-License-Identifier: Apache-2.0
// The coordinator, rule by rule: what is published together and when, what is forgotten, who waits too
// long.
#include "control/coordinator/coordinator_harness.h"

namespace farandole {

TEST(a_group_is_published_whole) {
  Job job(2);
  Request a = grouped(tensor("a"), "g", 2), b = grouped(tensor("b"), "g", 2);
  job.submit_all(a);
  job.submit(0, b);
  CHECK_EQ(kinds(job.publish()), "");
  job.submit(1, b);
  Log log = job.publish();
  CHECK_EQ(kinds(log), "define define run");
  CHECK_EQ(only<Run>(log).items.size(), 2);
}

TEST(one_failure_fails_its_whole_group) {
  for (bool bad_first : {true, false}) {
    Job job(2);
    Request good = grouped(tensor("good"), "g", 2), bad = grouped(tensor("bad"), "g", 2);
    Request odd = grouped(tensor("bad", {7}), "g", 2);
    if (!bad_first) job.submit_all(good);
    job.submit(0, bad);
    job.submit(1, odd);
    if (bad_first) {
      CHECK_EQ(kinds(job.publish()), "fail");  // within a second, not when the group is full
      job.submit_all(good);
    }
    for (const Fail& fail : all<Fail>(job.publish())) {
      CHECK(fail.failure.code == ErrorCode::kMismatch);
      contains(fail.failure.text, "'bad'");
    }
    job.submit_all(good);
    CHECK_EQ(kinds(job.publish()), "");  // no memory of the failure
    job.submit_all(bad);
    CHECK_EQ(only<Run>(job.publish()).items.size(), 2);
  }
}

TEST(ranks_that_disagree_about_groups_all_fail) {
  Job job(2);
  for (const char* name : {"a", "b"}) job.submit(0, grouped(tensor(name), "g", 2));
  for (const char* name : {"b", "a"}) job.submit(1, grouped(tensor(name), "h", 2));
  auto fails = all<Fail>(job.publish());
  CHECK_EQ(fails.size(), 2);
  for (const Fail& fail : fails)
    contains(fail.failure.text, "group is 'g' on rank 0, 'h' on rank 1");
  for (const char* group : {"g", "h"}) {
    for (const char* name : {"a", "b"}) job.submit_all(grouped(tensor(name), group, 2));
    CHECK_EQ(only<Run>(job.publish()).items.size(), 2);
    job.report(0, Done{kWorldSet, group[0] == 'g' ? uint64_t{1} : uint64_t{2}});
  }
}

TEST(a_refused_group_fails_and_is_forgotten) {
  for (bool refused_first : {true, false}) {
    Job job(2);
    Request a = grouped(tensor("a"), "g", 2), b = grouped(tensor("b"), "g", 2);
    auto refuse = [&] {
      for (const char* name : {"b", "a"}) {
        job.report(1, Refuse{{kWorldSet, name, 0}, {ErrorCode::kInvalidArgument, "no"}});
      }
    };
    if (refused_first) refuse();
    job.submit(0, a);
    job.submit(0, b);
    if (!refused_first) refuse();
    CHECK_EQ(kinds(job.publish()), "fail fail");
    job.submit_all(a);
    CHECK_EQ(kinds(job.publish()), "");
    job.submit_all(b);
    CHECK_EQ(only<Run>(job.publish()).items.size(), 2);
  }
}

TEST(at_most_two_buckets_are_outstanding_and_the_rest_collect) {
  Job job(2);
  for (const char* name : {"a", "b"}) {
    job.submit_all(tensor(name));
    CHECK_EQ(kinds(job.publish()), "define run");
  }
  for (const char* name : {"c", "d", "e"}) {
    job.submit_all(tensor(name));
    CHECK_EQ(kinds(job.publish()), "");
  }
  job.report(0, Done{kWorldSet, 1});
  Run run = only<Run>(job.publish());
  CHECK_EQ(run.bucket, 3);
  CHECK_EQ(run.items.size(), 3);
  job.submit_all(tensor("f"));
  CHECK_EQ(kinds(job.publish()), "");
  job.report(0, Done{kWorldSet, 3});  // the second, too: a lane finishes in order
  CHECK_EQ(only<Run>(job.publish()).bucket, 4);
}

TEST(a_result_does_not_wait_for_buckets) {
  Job job(2);
  for (const char* name : {"a", "b", "c"}) {
    job.submit_all(tensor(name));
    job.publish();
  }
  job.submit_all(tensor("tiny", {1}), payload<float>({1}));
  CHECK_EQ(kinds(job.publish()), "define result");
}

TEST(a_bucket_holds_what_became_ready_together_up_to_the_limit) {
  auto settings = Job::settings(2);
  settings.fusion_bytes = 10'000;
  Job job(settings);
  for (const char* name : {"a", "b", "c"}) job.submit_all(tensor(name, {1000}));
  Log log = job.publish();
  auto runs = all<Run>(log);
  CHECK_EQ(runs.size(), 2);
  CHECK_EQ(runs[0].items.size(), 2);  // 8,000 bytes
  CHECK_EQ(runs[1].items.size(), 1);
  job.report(0, Done{kWorldSet, 2});
  job.submit_all(tensor("huge", {100'000}));  // beyond the limit, alone
  CHECK_EQ(only<Run>(job.publish()).items.size(), 1);
}

TEST(a_bucket_has_at_most_1024_calls) {
  Job job(2);
  for (int i = 0; i < 1025; ++i) job.submit_all(tensor(std::to_string(i)));
  const auto runs = all<Run>(job.publish());
  CHECK_EQ(runs.size(), 2);
  CHECK_EQ(runs[0].items.size(), 1024);
}

TEST(a_group_stays_in_one_bucket) {
  auto settings = Job::settings(2);
  settings.fusion_bytes = 10'000;
  Job job(settings);
  for (const char* name : {"a", "b", "c", "d"}) job.submit_all(grouped(tensor(name), "g", 4));
  job.submit_all(tensor("e"));
  auto runs = all<Run>(job.publish());
  CHECK_EQ(runs.size(), 2);
  CHECK_EQ(runs[0].items.size(), 4);
}

TEST(the_least_recently_used_id_is_forgotten) {
  auto settings = Job::settings(2);
  settings.capacity = 2;
  Job job(settings);
  auto run = [&](const char* name) {
    job.submit_all(tensor(name));
    Log log = job.publish();
    for (const Run& run : all<Run>(log)) job.report(0, Done{kWorldSet, run.bucket});
    return log;
  };
  uint32_t a = only<Define>(run("a")).id;
  uint32_t b = only<Define>(run("b")).id;
  CHECK_EQ(kinds(run("a")), "run");  // b is the oldest now
  Log log = run("c");
  CHECK_EQ(only<Forget>(log).id, b);
  CHECK_EQ(job.coordinator().definitions(), 2);
  CHECK(job.table().contains(a));
  CHECK(only<Define>(run("d")).id > 3);  // b is not free before all ranks have dropped it
  job.report(0, Forgot{b});
  CHECK(only<Define>(run("e")).id != b);
  job.report(1, Forgot{b});
  CHECK_EQ(only<Define>(run("f")).id, b);
}

TEST(an_id_in_flight_is_never_forgotten) {
  auto settings = Job::settings(2);
  settings.capacity = 1;
  Job job(settings);
  job.submit(0, tensor("waits"));
  for (int i = 0; i < 10; ++i) {
    job.submit_all(tensor("n" + std::to_string(i)));
    Log log = job.publish();
    CHECK_EQ(all<Define>(log).size(), 1);
    job.report(0, Done{kWorldSet, static_cast<uint64_t>(i) + 1});
  }
  CHECK(job.coordinator().definitions() <= 3);
  job.submit(1, tensor("waits"));
  CHECK_EQ(only<Define>(job.publish()).request.name, "waits");
}

TEST(a_late_report_by_a_forgotten_id_still_counts) {
  auto settings = Job::settings(2);
  settings.capacity = 1;
  Job job(settings);
  job.submit_all(tensor("a"));
  uint32_t a = only<Define>(job.publish()).id;
  job.report(0, Done{kWorldSet, 1});
  job.submit_all(tensor("b"));
  CHECK_EQ(only<Forget>(job.publish()).id, a);
  job.report(0, Done{kWorldSet, 2});
  // Rank 0 has not seen that yet; rank 1 has.
  job.report(0, Ready{a, {}, 0, input()});
  job.report(0, Forgot{a});
  job.report(1, Forgot{a});
  job.report(1, Ready{0, tensor("a"), 0, input()});
  Define again = only<Define>(job.publish());
  CHECK(again.id != a);
  CHECK_EQ(again.request.name, "a");
  CHECK_THROWS(job.report(0, Ready{a, {}, 0, input()}), ErrorCode::kInternal);
}

TEST(a_stall_is_warned_about_and_given_up) {
  auto settings = Job::settings(3);
  settings.stall_abort_ns = 25'000'000'000;
  Job job(settings);
  job.at(1);
  job.submit(2, tensor("x"));
  job.submit(0, tensor("x"));
  job.at(10);
  CHECK_EQ(kinds(job.tick()), "");
  CHECK(job.coordinator().take_notices().empty());
  CHECK_EQ(job.coordinator().next_tick(), 11'000'000'000);
  job.at(11);
  CHECK(only<CollectStacks>(job.tick()).ranks == std::vector<Rank>{1});
  CHECK(job.coordinator().take_notices().empty());
  CHECK_EQ(job.coordinator().next_tick(), 12'500'000'000);
  job.report(1, StackReport{false, "in load_data"});
  auto notices = job.coordinator().take_notices();
  CHECK_EQ(notices.size(), 1);
  contains(notices[0], "'x' (allreduce): ranks 0, 2 waiting for 10 s, rank 1 missing");
  contains(notices[0], "rank 1 has made no call yet");
  contains(notices[0], "\n    in load_data");
  job.at(13);
  CHECK_EQ(kinds(job.tick()), "");
  CHECK_EQ(job.coordinator().next_tick(), 21'000'000'000);
  job.at(21);
  CHECK_EQ(kinds(job.tick()), "where");  // again
  job.at(23);
  job.tick();
  contains(job.coordinator().take_notices().at(0), "rank 1 does not answer");
  CHECK_EQ(job.coordinator().next_tick(), 26'000'000'000);
  job.at(26);
  Fail fail = only<Fail>(job.tick());
  CHECK(fail.failure.code == ErrorCode::kStall);
  contains(fail.failure.text, "rank 1 missing\n  rank 1 does not answer");
  CHECK(fail.unheard == std::vector<Rank>{1});
  CHECK_EQ(job.coordinator().next_tick(), std::numeric_limits<int64_t>::max());
  job.submit_all(tensor("x"));
  CHECK_EQ(kinds(job.publish()), "define run");
}

TEST(a_report_that_crosses_the_stall_error_begins_a_new_call) {
  Job job(Job::impatient(2));
  job.submit(0, tensor("x"));
  job.at(1);
  CHECK(only<Fail>(job.tick()).unheard == std::vector<Rank>{1});  // rank 1 is told to ignore it
  job.submit(1, tensor("x"));
  CHECK_EQ(kinds(job.publish()), "");
  job.submit(0, tensor("x"));
  CHECK_EQ(kinds(job.publish()), "define run");
}

TEST(an_unnamed_call_given_up_keeps_its_place) {
  Job job(Job::impatient(3));
  job.submit(0, tensor(""));
  job.at(1);
  CHECK_EQ(only<Fail>(job.tick()).key.sequence, 0);
  job.submit(0, tensor("", {5}));  // its second
  for (Rank late : {1, 2}) {
    job.submit(late, tensor(""));  // its first: fails at once
    Fail fail = only<Fail>(job.publish());
    CHECK_EQ(fail.key.sequence, 0);
    CHECK(fail.failure.code == ErrorCode::kStall);
    CHECK(fail.unheard.empty());
  }
  for (Rank late : {1, 2}) job.submit(late, tensor("", {5}));
  CHECK_EQ(only<Run>(job.publish()).items[0].sequence, 1);
}

TEST(a_group_that_never_fills_stalls_as_a_whole) {
  auto settings = Job::settings(2);
  settings.stall_warn_ns = 2'000'000'000;
  settings.stall_abort_ns = 5'000'000'000;
  Job job(settings);
  Request a = grouped(tensor("a"), "g", 2), b = grouped(tensor("b"), "g", 2);
  job.submit_all(a);
  job.at(3);
  job.tick();
  contains(job.coordinator().take_notices()[0], "for the rest of group 'g'");
  job.submit(0, b);  // younger than the limit, but lost with its group
  job.at(5);
  CHECK_EQ(kinds(job.tick()), "fail fail");
  job.submit_all(a);
  job.submit_all(b);
  CHECK_EQ(only<Run>(job.publish()).items.size(), 2);
}

TEST(a_long_stall_report_is_cut) {
  Job job(2);
  for (int i = 0; i < 100; ++i) job.submit(0, tensor("n" + std::to_string(i)));
  job.at(10);
  job.tick();
  job.report(1, StackReport{});
  auto notices = job.coordinator().take_notices();
  CHECK_EQ(notices.size(), 1);
  contains(notices[0], "and 80 more");
}

TEST(without_limits_nothing_ticks) {
  auto settings = Job::settings(2);
  settings.stall_warn_ns = settings.stall_abort_ns = 0;
  Job job(settings);
  job.submit(0, tensor("x"));
  CHECK_EQ(job.coordinator().next_tick(), std::numeric_limits<int64_t>::max());
}

}  // namespace farandole
