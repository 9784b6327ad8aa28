// SPDX-License-Identifier: Apache-2.0
// The coordinator, rule by rule: what is published together and when, what is forgotten, who waits too
// long.
#include "control/coordinator/coordinator_harness.h"

namespace farandole {

TEST(a_result_does_not_wait_for_buckets) {
  Job job(2);
  for (const char* name : {"*+a", "*+b", "*+c"}) job.play(name);
  job.submit_all(tensor("tiny", {1}), payload<float>({1}));
  CHECK_EQ(kinds(job.publish()), "define result");
}

TEST(a_bucket_holds_what_became_ready_together_up_to_the_limit) {
  auto settings = Job::settings(2);
  settings.fusion_bytes = 10'000;
  Job job(settings);
  auto runs = all<Run>(job.play("*+a *+b *+c"));
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

// Consecutive ids take the room of one in the log, too.
TEST(a_bucket_of_many_calls_is_a_short_entry) {
  Coordinator coordinator(Job::settings(1));
  std::vector<Entry> log;
  IdRuns ids;
  for (int t = 0; t < 500; ++t) {
    Ready ready;
    ready.request = tensor("t" + std::to_string(t));
    ready.contribution = input();
    coordinator.receive(0, ready, 0);
  }
  coordinator.publish(log);
  for (const Define& define : all<Define>(log)) ids.add(define.id);
  coordinator.receive(0, Done{kWorldSet, only<Run>(log).bucket}, 0);
  coordinator.receive(0, ReadyMany{ids}, 0);
  coordinator.publish(log);
  CHECK_EQ(only<Run>(log).plain.size(), 500);
  ByteString bytes;
  encode(log.front(), bytes);
  CHECK(bytes.size() < 64);
}

TEST(the_least_recently_used_id_is_forgotten) {
  auto settings = Job::settings(2);
  settings.capacity = 2;
  Job job(settings);
  auto run = [&](const std::string& name) {
    Log log = job.play("*+" + name);
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

TEST(a_stall_is_warned_about_and_given_up) {
  auto settings = Job::settings(3);
  settings.stall_abort_ns = 25'000'000'000;
  Job job(settings);
  job.at(1);
  job.play("2+x 0+x");
  CHECK_EQ(kinds(job.tick(10)), "");
  CHECK(job.notices().empty());
  CHECK_EQ(job.coordinator().next_tick(), 11'000'000'000);
  CHECK(only<CollectStacks>(job.tick(11)).ranks == std::vector<Rank>{1});
  CHECK(job.notices().empty());
  CHECK_EQ(job.coordinator().next_tick(), 12'500'000'000);
  job.report(1, StackReport{false, "in load_data"});
  auto notices = job.notices();
  CHECK_EQ(notices.size(), 1);
  contains(notices[0], "'x' (allreduce): ranks 0, 2 waiting for 10 s, rank 1 missing");
  contains(notices[0], "rank 1 has made no call yet");
  contains(notices[0], "\n    in load_data");
  CHECK_EQ(kinds(job.tick(13)), "");
  CHECK_EQ(job.coordinator().next_tick(), 21'000'000'000);
  CHECK_EQ(kinds(job.tick(21)), "where");  // again
  job.tick(23);
  contains(job.notice(), "rank 1 does not answer");
  CHECK_EQ(job.coordinator().next_tick(), 26'000'000'000);
  Fail fail = only<Fail>(job.tick(26));
  CHECK(fail.failure.code == ErrorCode::kStall);
  contains(fail.failure.text, "rank 1 missing\n  rank 1 does not answer");
  CHECK(fail.unheard == std::vector<Rank>{1});
  CHECK_EQ(job.coordinator().next_tick(), std::numeric_limits<int64_t>::max());
  CHECK_EQ(kinds(job.play("*+x")), "define run");
}

TEST(a_long_stall_report_is_cut) {
  Job job(2);
  for (int i = 0; i < 100; ++i) job.submit(0, tensor("n" + std::to_string(i)));
  job.tick(10);
  job.report(1, StackReport{});
  auto notices = job.notices();
  CHECK_EQ(notices.size(), 1);
  contains(notices[0],
           "\n  100 calls (the first: 'n0' (allreduce)): rank 0 waiting for 10 s, rank 1 missing");
}

// Calls that one rank makes alone have no last rank.
TEST(the_last_rank_of_a_call_is_told_with_its_delay) {
  Job job(3);
  const SetId alone = job.add_set({1});
  std::vector<Coordinator::LateRank> late;
  job.coordinator().take_late_ranks(late);
  job.at(5);
  for (Rank rank : {0, 2}) job.submit(rank, tensor("x"));
  job.submit(1, in_set(tensor("y"), alone));
  job.at(8);
  job.submit(1, tensor("x"));
  job.coordinator().take_late_ranks(late);
  CHECK_EQ(late.size(), 1);
  CHECK_EQ(late[0].rank, 1);
  CHECK_EQ(late[0].after_ns, 3'000'000'000);
}

TEST(without_limits_nothing_ticks) {
  auto settings = Job::settings(2);
  settings.stall_warn_ns = settings.stall_abort_ns = 0;
  Job job(settings);
  job.submit(0, tensor("x"));
  CHECK_EQ(job.coordinator().next_tick(), std::numeric_limits<int64_t>::max());
}

}  // namespace farandole
