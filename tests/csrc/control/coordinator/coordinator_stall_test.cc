// SPDX-License-Identifier: Apache-2.0
// The text about calls that wait: the coordinator's facts about the missing ranks.
#include "control/coordinator/coordinator_harness.h"

namespace farandole {
namespace {

Coordinator::Settings watchful(int ranks) {
  auto settings = Job::settings(ranks);
  settings.stall_warn_ns = 10'000'000'000;
  settings.stall_abort_ns = 30'000'000'000;
  return settings;
}

// The notice of a job whose calls have waited for their time, once every rank asked has answered.
std::string notice_of(Job& job) {
  for (Rank rank : only<CollectStacks>(job.tick(20)).ranks) {
    job.report(rank, StackReport{false, "File \"train.py\", line " + std::to_string(10 + rank)});
  }
  return job.notice();
}

}  // namespace

TEST(a_notice_names_ranks_that_make_calls_in_different_orders) {
  Job job(watchful(2));
  job.play("0+first 1+second");
  const std::string text = notice_of(job);
  contains(text, "'first' (allreduce): rank 0 waiting for 20 s, rank 1 missing");
  contains(text,
           "rank 1 waits in 'second' (allreduce), which rank 0 has not called: make the same calls "
           "on all ranks, with the same names and tags, and blocking calls in the same order");
  contains(text, "rank 0 waits in 'first' (allreduce), which rank 1 has not called");
  contains(text, "\n    File \"train.py\", line 11");
  contains(text, "\n    File \"train.py\", line 10");
}

TEST(a_notice_does_not_name_young_calls) {
  Job job(watchful(2));
  job.submit(0, tensor("old"));
  job.at(15);
  job.submit(0, tensor("young"));
  const std::string text = notice_of(job);
  contains(text, "'old' (allreduce): rank 0 waiting for 20 s, rank 1 missing");
  CHECK(text.find("young") == std::string::npos);
}

TEST(calls_that_block_each_other_are_given_up_one_after_the_other) {
  Job job(watchful(2));
  job.submit(0, tensor("first"));
  job.at(1);
  job.submit(1, tensor("second"));
  contains(only<Fail>(job.tick(30)).failure.text, "rank 1 waits in 'second'");
  job.report(0, StackReport{});  // asked only now
  contains(only<Fail>(job.tick(31)).failure.text, "rank 0 waits in 'first'");
}

namespace {

StackReport blocked_in(const std::string& name, const std::string& frames) {
  return {false,
          "thread 5 (python) S\nMain thread (most recent call first):\n" + frames,
          true,
          {kWorldSet, name, 0}};
}

const std::string kInBackward =
    "  File \"/usr/lib/python3/dist-packages/torch/_tensor.py\", line 623 in backward\n"
    "  File \"/home/train.py\", line 8 in main, in the loop of line 6 and of line 7\n";

}  // namespace

TEST(a_disagreement_ends_when_every_rank_waits_for_another) {
  Job job(watchful(3));
  for (Rank rank : {0, 2}) {
    for (const char* name : {"0.a", "0.b", "0.c", "0.d", "0.consensus"})
      job.submit(rank, tensor("optimizer." + std::string(name)));
  }
  job.at(3);
  job.submit(1, tensor("metric"));
  job.at(10);  // before the warning's limit of rank 1's call
  CHECK(only<CollectStacks>(job.tick()).ranks == (std::vector<Rank>{0, 1, 2}));
  job.report(0, blocked_in("optimizer.0.a", kInBackward));
  job.report(2, blocked_in("optimizer.0.b", kInBackward));
  CHECK(job.notices().empty());
  job.report(1, blocked_in("metric",
                           "  File \"/home/train.py\", line 9 in main, in the loop of line 6\n"
                           "Thread 9 (most recent call first):\n"
                           "  File \"/home/loader.py\", line 3 in read\n"));
  const std::string diagnosis =
      "rank 1 left the training loop (train.py:9) while ranks 0, 2 are in backward (train.py:8): "
      "uneven data? use join() or drop_last\n"
      "  4 gradients of optimizer.0: ranks 0, 2 waiting for 10 s, rank 1 missing\n"
      "  'metric' (allreduce): rank 1 waiting for 7 s, ranks 0, 2 missing\n";
  const auto notices = job.notices();
  CHECK_EQ(notices.size(), 1);
  CHECK(notices[0].starts_with(diagnosis));
  contains(notices[0], "\n      File \"/home/train.py\", line 9 in main");
  contains(notices[0], "\n      File \"/home/train.py\", line 8 in main");
  CHECK(notices[0].find("loader.py") == std::string::npos);  // only the main thread's
  std::set<std::string> failed;
  for (const Entry& entry : job.publish()) {
    const Fail& fail = std::get<Fail>(entry);
    failed.insert(fail.key.name);
    CHECK(fail.failure.code == ErrorCode::kStall);
    contains(fail.failure.text, "no progress: " + diagnosis);
  }
  CHECK_EQ(failed.size(), 6);
}

// Each waits in a call that another has not made; but one of them, or one that they wait for, may yet go on.
TEST(a_disagreement_that_may_end_is_waited_for) {
  auto settings = watchful(3);
  settings.stall_abort_ns = 300'000'000'000;
  Job job(settings);
  job.submit(0, tensor("a"));  // asynchronous: rank 0 waits in "b"
  for (Rank rank : {0, 1}) job.submit(rank, tensor("b"));
  job.submit(1, tensor("c"));
  const auto waits_on = [&] {
    const std::vector<std::string> told = job.notices();
    CHECK_EQ(told.size(), 1);
    CHECK_EQ(kinds(job.publish()), "");
    return told[0];
  };
  CHECK_EQ(kinds(job.tick(10)), "where");
  job.report(0, blocked_in("b", kInBackward));
  job.report(1, blocked_in("c", kInBackward));
  job.report(2, StackReport{});  // computes, and makes "b" later
  contains(waits_on(), "some ranks wait for others:");
  CHECK_EQ(kinds(job.tick(20)), "where");
  job.report(0, blocked_in("b", kInBackward));
  job.report(1, blocked_in("c", kInBackward));
  job.report(2, StackReport{});
  CHECK_EQ(waits_on(),
           "some ranks still wait for others, for up to 20 s; nothing else has changed");
  CHECK_EQ(kinds(job.tick(30)), "where");
  job.report(0, blocked_in("a", kInBackward));
  job.report(1, StackReport{false, "  File \"other.py\", line 1 in main"});  // has a second thread
  job.report(2, blocked_in("b", ""));  // a call that it has not made
  contains(waits_on(), "this has changed:\n  rank 1");
}

TEST(a_notice_says_that_a_rank_does_not_use_a_tensor) {
  Job job(watchful(2));
  job.submit(0, tensor("unused"));
  job.at(15);
  job.play("*+used");
  job.report(0, Done{kWorldSet, 1});
  contains(notice_of(job),
           "rank 1 has made other calls since, the last 5.0 s ago: it does not make "
           "this one");
}

// These calls come to know only by its answer.
TEST(a_notice_counts_calls_without_the_coordinator) {
  Job job(watchful(3));
  job.play("*+x");
  job.report(0, Done{kWorldSet, 1});
  job.at(2);
  job.submit(0, tensor("x"));
  CHECK(only<CollectStacks>(job.tick(20)).ranks == (std::vector<Rank>{1, 2}));
  StackReport before{}, since{};
  before.direct_ago_ns = 19'000'000'000;
  since.direct_ago_ns = 4'000'000'000;
  job.report(1, before);
  job.report(2, since);
  const std::string notice = job.notice();
  contains(notice, "rank 1 has made no call for 19.0 s");
  contains(notice, "rank 2 has made other calls since, the last 4.0 s ago");
}

// Rank 1 has completed its last call with rank 0, which makes its next one at once. Its answer takes a while.
TEST(an_answer_that_travels_does_not_make_a_call_later) {
  Job job(watchful(2));
  job.at(10);
  job.submit(0, tensor("x"));
  CHECK_EQ(kinds(job.tick(20)), "where");
  StackReport answer{};
  answer.direct_ago_ns = 10'500'000'000;
  job.at(21);
  job.report(1, answer);
  contains(job.notice(), "rank 1 has made no call for 11.5 s");
}

namespace {

// Ranks 1 and 2, which leads, share a host; rank 3 leads the host below it.
Coordinator::Settings on_hosts() {
  auto settings = watchful(4);
  settings.above = {-1, 2, 0, 2};
  return settings;
}

}  // namespace

// Rank 2 has submitted the call, and stands still. Nobody hears the others of its host, and of the host below.
TEST(a_leader_that_stands_still_is_named_instead_of_the_ranks_behind_it) {
  Job job(on_hosts());
  for (Rank r : {0, 2}) job.submit(r, tensor("x"));
  CHECK(only<CollectStacks>(job.tick(10)).ranks == (std::vector<Rank>{1, 2, 3}));
  job.tick(12);
  const std::string notice = job.notice();
  for (const char* rank : {"rank 1", "rank 3"}) {
    contains(notice, std::string(rank) + " can't be reached: rank 2, which forwards its reports");
  }
  CHECK(notice.find("not even from its background thread") == std::string::npos);
}

TEST(a_leader_is_stuck_and_not_the_ranks_behind_it) {
  Job job(on_hosts());
  CHECK_EQ(kinds(job.play("*+x")), "define run");
  job.at(10);
  job.report(0, stuck_for(10, {0, 1, 2, 3}));
  CHECK_EQ(kinds(job.tick()), "where");
  job.report(0, StackReport{});
  job.tick(12);
  contains(job.notice(), "it has not ended for 10 s; rank 2 stuck");
}

// Those of its cells are not known before it is asked.
TEST(a_rank_that_was_not_asked_is_not_said_to_make_no_calls) {
  Job job(2);
  job.submit(0, tensor("x"));
  job.report(0, Inquire{7, {kWorldSet, "x", 0}});
  CHECK_EQ(only<Answer>(job.publish()).text,
           "'x' (allreduce): rank 0 waiting for 0 s, rank 1 missing");
}

TEST(questions_for_a_sign_of_life_have_one_answer) {
  Job job(3);
  for (Rank r : {0, 1, 2}) job.report(r, Inquire{});
  CHECK_EQ(only<Answer>(job.publish()).to, -1);
  job.report(1, Inquire{});
  CHECK_EQ(kinds(job.publish()), "answer");
}

TEST(a_notice_says_that_a_rank_is_out_of_data) {
  Job job(watchful(2));
  job.play("*+x");
  job.report(0, Done{kWorldSet, 1});
  job.at(2);
  job.submit(0, tensor("x"));
  contains(notice_of(job),
           "rank 1 has made no call for 20.0 s: it has run out of data (use join() "
           "or drop_last)");
}

TEST(a_notice_names_the_set_in_whose_join_a_rank_waits) {
  Job job(watchful(3));
  const SetId set = job.add_set({0, 1});
  job.report(1, Join{kWorldSet});
  job.submit(0, in_set(tensor("x"), set));
  contains(notice_of(job),
           "rank 1 waits in join() of process set 0, but this call is in a different process set");
}

// Its join() is an old fact: why it makes no progress now is told first.
TEST(a_silent_rank_that_has_joined_another_set_does_not_answer) {
  Job job(watchful(3));
  job.submit_all(add_set_of({0, 1}), no_input());
  const SetId set = only<OpenSet>(job.publish()).set;
  job.report(1, Join{kWorldSet});
  job.submit(0, in_set(tensor("x"), set));
  job.at(10);
  for (Rank rank : only<CollectStacks>(job.tick()).ranks) {
    if (rank != 1) job.report(rank, StackReport{});
  }
  job.at(12);
  job.tick();
  contains(job.coordinator().take_notices().at(0), "rank 1 does not answer");
}

TEST(a_stopped_rank_is_named) {
  Job job(watchful(2));
  job.submit(0, tensor("x"));
  CHECK_EQ(kinds(job.tick(10)), "where");
  job.report(1, StackReport{true, "pid 5"});
  contains(job.notice(), "rank 1 is stopped by a signal or a debugger\n    pid 5");
}

// Asked anew a moment before the end, it has had no time to answer.
TEST(a_rank_that_is_asked_again_is_not_silent) {
  Job job(watchful(2));
  job.submit(0, tensor("x"));
  CHECK_EQ(kinds(job.tick(10)), "where");
  job.report(1, StackReport{false, "File \"train.py\", line 11"});
  CHECK_EQ(kinds(job.tick(29)), "where");
  const std::string text = only<Fail>(job.tick(30)).failure.text;
  contains(text, "rank 1 has made no call yet");
  contains(text, "File \"train.py\", line 11");
}

TEST(a_stall_that_ends_in_time_is_not_reported) {
  Job job(watchful(2));
  job.submit(0, tensor("x"));
  CHECK_EQ(kinds(job.tick(10)), "where");
  job.submit(1, tensor("x"));
  job.publish();
  job.report(0, Done{kWorldSet, 1});
  job.report(1, StackReport{});
  CHECK(job.notices().empty());
}

namespace {

// Rank 1 is stopped while a bucket of the world, or of ranks 1 and 2, moves. `teller` alone waits for it.
void breaks_the_job(Job& job, Rank teller, SetId set, bool gpu, const std::string& what) {
  const std::vector<Rank> members = set == kWorldSet ? numbers_below(3) : std::vector<Rank>{1, 2};
  job.at(10);
  job.report(teller, stuck_for(10, members, set, gpu));
  CHECK(only<CollectStacks>(job.tick()).ranks == members);
  for (Rank r : members) {
    if (r != 1) job.report(r, StackReport{});
  }
  CHECK(job.notices().empty());
  job.report(1, StackReport{true, "pid 7"});
  contains(job.notice(),
           what + ": all have submitted it, but it has not ended for 10 s; rank 1 stuck");
  job.at(29);
  job.report(teller, stuck_for(29, members, set, gpu));
  CHECK_EQ(kinds(job.tick()), "where");
  for (Rank r : members) {
    if (r != 1) job.report(r, StackReport{});
  }
  job.at(30);
  job.report(teller, stuck_for(30, members, set, gpu));
  const Failure failure = only<Abort>(job.tick()).failure;
  CHECK(failure.code == ErrorCode::kStall);
  contains(failure.text, what);
  contains(failure.text, "rank 1 is stopped");
}

}  // namespace

// All have submitted; a member stands still while the bytes move.
TEST(a_bucket_that_stands_still_breaks_the_job) {
  Job job(watchful(3));
  CHECK_EQ(kinds(job.play("*+x")), "define run");
  breaks_the_job(job, 0, kWorldSet, false, "bucket 1 of process set 0");
}

TEST(a_bucket_that_stands_still_on_gpus_breaks_the_job) {
  Job job(watchful(3));
  breaks_the_job(job, 0, kWorldSet, true, "GPU bucket 1 of process set 0");
}

// The lowest rank has ended it: it needed nothing of the stopped one.
TEST(a_bucket_that_stands_still_on_a_later_rank_breaks_the_job) {
  Job job(watchful(3));
  job.play("*+x");
  job.report(0, Done{kWorldSet, 1});
  breaks_the_job(job, 2, kWorldSet, false, "bucket 1 of process set 0");
}

TEST(a_removed_set_s_bucket_that_stands_still_breaks_the_job) {
  Job job(watchful(3));
  const SetId set = job.add_set({1, 2});
  for (Rank r : {1, 2}) job.submit(r, in_set(tensor("x"), set));
  CHECK_EQ(kinds(job.publish()), "define run");
  job.submit_all(remove_set_of(set), no_input());
  CHECK_EQ(kinds(job.publish()), "close_set");
  breaks_the_job(job, 2, set, false, "bucket 1 of process set " + std::to_string(set));
}

// A rank reports buckets only while its user waits.
TEST(a_wait_that_begins_late_counts_from_the_bucket_s_begin) {
  Job job(watchful(2));
  job.at(100);
  job.report(0, stuck_for(90, {0, 1}));
  CHECK_EQ(kinds(job.tick()), "where");
  job.report(0, StackReport{});
  job.report(1, StackReport{true, "pid 7"});
  job.at(101);
  job.report(0, stuck_for(91, {0, 1}));
  contains(only<Abort>(job.tick()).failure.text, "it has not ended for 91 s; rank 1 stuck");
}

TEST(a_rank_that_reports_an_impossible_bucket_is_refused) {
  const std::vector<std::vector<Rank>> impossible{{}, {1}, {-1, 0}, {0, 2}, {1, 0}};
  for (const std::vector<Rank>& ranks : impossible) {
    Job job(2);
    CHECK_THROWS(job.report(0, stuck_for(1, ranks, 1)), ErrorCode::kInternal);
  }
}

// Rank 0 has run out of data. The others go on for a while.
TEST(a_join_for_which_nobody_comes_fails) {
  Job job(watchful(3));
  job.report(0, Join{kWorldSet});
  job.at(25);
  CHECK_EQ(kinds(job.play("1+x 2+x")), "define run");
  job.report(0, Done{kWorldSet, 1});
  CHECK_EQ(kinds(job.tick(34)), "");
  CHECK(only<CollectStacks>(job.tick(35)).ranks == (std::vector<Rank>{1, 2}));
  for (Rank r : {1, 2}) job.report(r, StackReport{});
  const std::string notice = job.notice();
  contains(notice, "join() of process set 0: rank 0 waiting for 10 s, ranks 1, 2 missing");
  contains(notice, "rank 2 has made no call for 10.0 s: it has run out of data");
  job.at(40);
  job.submit(1, tensor("y"));  // the job is not at rest
  job.tick(69);
  const Log log = job.tick(70);
  CHECK_EQ(kinds(log), "fail joined");
  const Failure failure = only<Joined>(log).failure;
  CHECK(failure.code == ErrorCode::kStall);
  contains(failure.text, "no progress: join() of process set 0: rank 0 waiting for 30 s");
  CHECK_EQ(kinds(job.play("*+z")), "define run");
}

// Rank 0 has run out of data. The others' bucket takes long, although they answer.
TEST(a_join_waits_while_a_bucket_moves) {
  Job job(watchful(3));
  job.report(0, Join{kWorldSet});
  CHECK_EQ(kinds(job.play("1+x 2+x")), "define run");
  for (int64_t now : {29, 31, 60}) {
    job.at(now);
    job.report(1, stuck_for(now, {}));
    job.tick();
    for (Rank r : {0, 1, 2}) job.report(r, StackReport{});
    CHECK(all<Joined>(job.publish()).empty());
  }
  job.report(0, Done{kWorldSet, 1});
  CHECK(all<Joined>(job.tick(89)).empty());
  contains(only<Joined>(job.tick(90)).failure.text, "ranks 1, 2 missing");
}

// Ranks 1 and 2 complete calls in their cell, of which the coordinator learns from their answers only.
TEST(a_join_waits_while_others_make_calls_in_cells) {
  Job job(watchful(3));
  job.report(0, Join{kWorldSet});
  for (int64_t now : {10, 20, 29}) {
    job.tick(now);
    StackReport busy;
    busy.direct_ago_ns = 1'000'000;
    for (Rank r : {1, 2}) job.report(r, busy);
  }
  CHECK(all<Joined>(job.tick(31)).empty());
}

// As long as all answer, the machine is slow, or the tensor is huge.
TEST(a_slow_bucket_is_waited_for) {
  Job job(watchful(2));
  job.play("*+x");
  for (int64_t now = 10; now <= 100; now += 10) {
    job.at(now);
    job.report(0, stuck_for(now, {0, 1}));
    CHECK_EQ(kinds(job.tick()), "where");
    for (Rank r : {0, 1}) job.report(r, StackReport{});
    contains(job.notice(), now == 10 ? "it has not ended for" : "; nothing else has changed");
    CHECK_EQ(kinds(job.tick(now + 2)), "");
    CHECK_EQ(job.coordinator().next_tick(), (now + 10) * 1'000'000'000);
  }
  job.report(0, Done{kWorldSet, 1});  // and says no more that it stands still
  CHECK_EQ(kinds(job.tick(110)), "");
  CHECK_EQ(job.coordinator().next_tick(), std::numeric_limits<int64_t>::max());
}

TEST(a_rank_may_ask_whom_its_call_waits_for) {
  Job job(3);
  job.play("0+x 2+x 2+");
  job.at(4);
  job.report(2, Inquire{7, {kWorldSet, "x", 0}, false});
  Answer answer = only<Answer>(job.publish());
  CHECK_EQ(answer.to, 2);
  CHECK_EQ(answer.number, 7);
  contains(answer.text, "'x' (allreduce): ranks 0, 2 waiting for 4 s, rank 1 missing");
  job.report(2, Inquire{8, {kWorldSet, "", 0}, false});
  contains(only<Answer>(job.publish()).text, "unnamed call 1 (allreduce): rank 2 waiting");
  job.submit(1, tensor("x"));
  job.publish();
  job.report(0, Inquire{9, {kWorldSet, "x", 0}, false});
  contains(only<Answer>(job.publish()).text, "all ranks have submitted it");
  job.report(0, Join{kWorldSet});
  job.report(0, Inquire{10, {kWorldSet, "", 0}, true});
  contains(only<Answer>(job.publish()).text, "ranks 1, 2 not joined yet");
}

}  // namespace farandole
