// SPDX-License-Identifier: Apache-2.0
// The coordinator, rule by rule: process sets and joining.
#include "control/coordinator/coordinator_harness.h"

namespace farandole {
namespace {

Failure refused_set(Job& job, const std::vector<int64_t>& ranks) {
  job.submit_all(add_set_of(ranks), no_input());
  return only<Fail>(job.publish()).failure;
}

}  // namespace

TEST(an_impossible_set_is_refused) {
  Job job(3);
  for (const std::vector<int64_t>& ranks :
       {std::vector<int64_t>{}, {0, 0}, {1, 0}, {-1, 2}, {0, 3}, {int64_t{1} << 32}}) {
    Failure failure = refused_set(job, ranks);
    CHECK(failure.code == ErrorCode::kInvalidArgument);
    contains(failure.text, "between 0 and 2");
  }
  SetId set = job.add_set({0, 2});
  contains(refused_set(job, {0, 2}).text, "exists already, with id " + std::to_string(set));
  contains(refused_set(job, {0, 1, 2}).text, "exists already, with id 0");
}

TEST(sets_are_limited) {
  auto settings = Job::settings(3);
  settings.max_sets = 3;
  Job job(settings);
  job.add_set({0});
  SetId second = job.add_set({1});
  contains(refused_set(job, {2}).text, "FARANDOLE_PROCESS_SETS");
  job.submit_all(remove_set_of(second), no_input());
  job.publish();
  job.add_set({2});
}

TEST(only_a_set_that_is_there_can_be_removed) {
  Job job(2);
  SetId set = job.add_set({0});
  for (SetId wrong : {kWorldSet, set + 1, -1}) {
    job.submit_all(remove_set_of(wrong), no_input());
    contains(only<Fail>(job.publish()).failure.text, "can't be removed");
  }
  // Twice in one batch: the second finds nothing.
  job.submit_all(remove_set_of(set, "one"), no_input());
  job.submit_all(remove_set_of(set, "two"), no_input());
  CHECK_EQ(kinds(job.publish()), "close_set fail");
}

TEST(a_set_can_be_added_again_in_the_batch_that_removes_it) {
  Job job(2);
  SetId set = job.add_set({0});
  job.submit_all(remove_set_of(set), no_input());
  job.submit_all(add_set_of({0}), no_input());
  CHECK_EQ(kinds(job.publish()), "close_set open_set");
}

TEST(members_form_and_disband_a_set_alone) {
  Job job(4);
  std::vector<SetId> sets;
  for (const char* name : {"a", "b"}) {  // two of the same ranks
    job.submit(3, form_set_of({1, 3}, name), no_input());
    CHECK_EQ(kinds(job.publish()), "");
    job.submit(1, form_set_of({1, 3}, name), no_input());
    OpenSet open = only<OpenSet>(job.publish());
    CHECK(open.ranks == (std::vector<Rank>{1, 3}));
    sets.push_back(open.set);
  }
  CHECK(sets[0] != sets[1]);
  job.submit(1, disband_set_of(sets[0], {1, 3}), no_input());
  job.submit(1, in_set(tensor("x"), sets[1]));
  CHECK_EQ(kinds(job.publish()), "");
  job.submit(3, disband_set_of(sets[0], {1, 3}), no_input());
  CHECK_EQ(only<CloseSet>(job.publish()).set, sets[0]);
  job.submit(3, in_set(tensor("x"), sets[1]));
  CHECK_EQ(only<Run>(job.publish()).set, sets[1]);
}

TEST(ranks_that_mean_other_members_all_get_the_mismatch) {
  const std::vector<std::pair<Rank, std::vector<int64_t>>> wishes = {
      {0, {0, 1}}, {1, {0, 1, 2}}, {2, {0, 1, 2}}};
  std::vector<size_t> order = {0, 1, 2};
  do {
    Job job(4);
    Log log;
    for (size_t i : order) {
      job.submit(wishes[i].first, form_set_of(wishes[i].second), no_input());
      for (Entry& entry : job.publish()) log.push_back(std::move(entry));
    }
    CHECK(all<OpenSet>(log).empty());
    CHECK(!all<Fail>(log).empty());
    for (const Fail& fail : all<Fail>(log)) {
      CHECK(fail.failure.code == ErrorCode::kMismatch);
      contains(fail.failure.text, "shape is (0, 1) on rank 0, (0, 1, 2) on rank");
    }
    CHECK(std::holds_alternative<Fail>(log.back()));  // the last one hears of it, too
  } while (std::ranges::next_permutation(order).found);
}

TEST(a_rank_that_comes_too_late_with_other_members_fails_at_once) {
  Job job(4);
  for (Rank r : {0, 1}) job.submit(r, form_set_of({0, 1}), no_input());
  CHECK_EQ(kinds(job.publish()), "open_set");
  job.submit(2, form_set_of({1, 2}), no_input());
  Fail fail = only<Fail>(job.publish());
  CHECK(fail.failure.code == ErrorCode::kMismatch);
  contains(fail.failure.text, "'form' is already a process set of ranks 0, 1");
}

namespace {

void leave(Job& job, const std::vector<Rank>& ranks) {
  for (Rank r : ranks) job.report(r, Leave{false, "", false});
}

// Ranks 1 and 3, which are no members, leave before `step` of a set's life.
void live_without_others(int step) {
  Job job(4);
  int now = 0;
  auto next = [&](Rank from, const Request& request, const Contribution& given) {
    if (now++ == step) leave(job, {1, 3});
    job.submit(from, request, given);
    return job.publish();
  };
  CHECK(next(0, form_set_of({0, 2}), no_input()).empty());
  const SetId set = only<OpenSet>(next(2, form_set_of({0, 2}), no_input())).set;
  CHECK(next(2, in_set(tensor("x"), set), input()).empty());
  CHECK_EQ(only<Run>(next(0, in_set(tensor("x"), set), input())).set, set);
  CHECK(next(2, disband_set_of(set, {0, 2}), no_input()).empty());
  CHECK_EQ(only<CloseSet>(next(0, disband_set_of(set, {0, 2}), no_input())).set, set);
}

}  // namespace

TEST(members_need_nobody_else_who_has_left) {
  for (int step = 0; step < 6; ++step) live_without_others(step);
}

// Also whoever waits for them while they leave.
TEST(the_world_changes_sets_without_those_who_have_left) {
  Job job(4);
  const SetId old = job.add_set({0, 1, 3});
  leave(job, {1});
  for (Rank r : {0, 2}) job.submit(r, add_set_of({0, 2}), no_input());
  CHECK(job.publish().empty());
  leave(job, {3});
  CHECK(only<OpenSet>(job.publish()).ranks == (std::vector<Rank>{0, 2}));
  for (Rank r : {2, 0}) job.submit(r, remove_set_of(old), no_input());
  CHECK_EQ(only<CloseSet>(job.publish()).set, old);
  job.submit(2, add_set_of({0}, ""), no_input());  // by order, which the others have left
  contains(only<Fail>(job.publish()).failure.text, "ranks 1, 3 finished normally and left");
}

// A leave ends joins. Whoever was counted as joined may report the call now, so the others make it again.
TEST(a_join_that_ends_early_counts_no_more) {
  Job job(4);
  job.report(1, Join{kWorldSet});
  job.submit(0, add_set_of({0, 2}), no_input());
  leave(job, {3});
  const Log log = job.publish();
  CHECK_EQ(kinds(log), "fail joined");
  contains(only<Fail>(log).failure.text, "rank 3 finished normally and left");
  job.submit(0, add_set_of({0, 2}), no_input());
  job.report(1, Join{kWorldSet});  // ends at once
  CHECK_EQ(kinds(job.publish()), "joined");
  for (Rank r : {1, 2}) job.submit(r, add_set_of({0, 2}), no_input());
  CHECK(only<OpenSet>(job.publish()).ranks == (std::vector<Rank>{0, 2}));
}

// Also if a rank has another call in mind, though calls of the world fail now.
TEST(ranks_that_stay_may_disagree) {
  for (bool refuses : {true, false}) {
    Job job(4);
    leave(job, {1, 3});
    for (int round = 0; round < 2; ++round) {
      job.submit(0, remove_set_of(7, "x"), no_input());
      CHECK(job.publish().empty());
      if (refuses) {
        job.report(2, Refuse{{kWorldSet, "x", 0}, kBad});
      } else {
        job.submit(2, tensor("x"));
      }
      const Failure failure = only<Fail>(job.publish()).failure;
      CHECK(failure.code == (refuses ? ErrorCode::kWrongType : ErrorCode::kMismatch));
    }
    job.submit(0, remove_set_of(7, "x"), no_input());
    job.submit(3, remove_set_of(7, "x"), no_input());  // after its end
    job.submit(3, tensor("x"));
    job.report(1, Refuse{{kWorldSet, "x", 0}, kBad, Op::kAddSet});
    CHECK(job.publish().empty());
  }
}

// It may leave before the others report the set, while they wait, or after its own report.
TEST(a_member_that_has_left_is_named) {
  enum { kBefore, kBetween, kAfter };
  for (const bool alone : {false, true}) {
    for (int when : {kBefore, kBetween, kAfter}) {
      Request form = add_set_of({0, 1}, "form");
      form.alone = alone;
      Job job(3);
      if (when == kAfter) job.submit(1, form, no_input());
      if (when != kBetween) leave(job, {1});
      CHECK(job.publish().empty());
      job.submit(0, form, no_input());
      if (!alone) job.submit(2, form, no_input());
      if (when == kBetween) leave(job, {1});
      const Failure failure = only<Fail>(job.publish()).failure;
      CHECK(failure.code == ErrorCode::kPeer);
      contains(failure.text, "rank 1 finished normally and left, so a process set of ranks 0, 1");
    }
  }
}

TEST(a_set_ends_without_members_that_have_left) {
  Job job(3);
  for (Rank r : {0, 2}) job.submit(r, form_set_of({0, 2}), no_input());
  const SetId set = only<OpenSet>(job.publish()).set;
  job.submit(0, disband_set_of(set, {0, 2}), no_input());
  CHECK(job.publish().empty());
  leave(job, {2});
  CHECK_EQ(only<CloseSet>(job.publish()).set, set);
}

// Of a rank that can't take part, its peers hear without the others, whoever comes first and whoever has left.
TEST(a_refusal_needs_no_more_ranks_than_the_call) {
  const Failure bad{ErrorCode::kWrongType, "bad"};
  for (int leavers = 0; leavers < 3; ++leavers) {
    for (bool refuses_first : {true, false}) {
      for (bool alone : {true, false}) {
        Job job(4);
        const Request form = alone ? form_set_of({0, 2}, "set") : add_set_of({0, 2}, "set");
        Refuse refusal{{kWorldSet, "set", 0}, bad, Op::kAddSet, {}};
        if (alone) refusal.members = {0, 2};
        if (leavers == 1) leave(job, {1, 3});
        if (refuses_first) job.report(0, refusal);
        job.submit(2, form, no_input());
        if (leavers == 2) leave(job, {1, 3});
        if (!refuses_first) job.report(0, refusal);
        if (!alone && leavers == 0) {
          for (Rank r : {1, 3}) job.submit(r, form, no_input());
        }
        const Fail fail = only<Fail>(job.publish());
        CHECK_EQ(fail.failure.text, "bad");
        CHECK(fail.unheard.empty());
      }
    }
  }
}

// Others may use a name that members have chosen for their set: an error, but the job goes on.
TEST(who_is_no_member_may_not_use_its_name) {
  for (bool refuses : {true, false}) {
    Job job(4);
    job.submit(0, form_set_of({0, 2}), no_input());
    if (refuses) {
      job.report(1, Refuse{{kWorldSet, "form", 0}, kBad});
    } else {
      job.submit(1, tensor("form"));
    }
    job.submit(2, form_set_of({0, 2}), no_input());
    const Failure failure = only<Fail>(job.publish()).failure;
    CHECK(failure.code == (refuses ? ErrorCode::kWrongType : ErrorCode::kMismatch));
  }
}

TEST(overlapping_sets_do_not_wait_for_each_other) {
  Job job(3);
  SetId left = job.add_set({0, 1}), right = job.add_set({1, 2});
  for (const char* name : {"a", "b", "c"}) {
    for (Rank r : {0, 1}) job.submit(r, in_set(tensor(name), left));
    job.publish();
  }
  job.submit(0, in_set(tensor("d"), left));
  for (Rank r : {1, 2}) job.submit(r, in_set(tensor("a"), right));  // the same name is another call
  CHECK_EQ(only<Run>(job.publish()).set, right);
}

TEST(join_ends_with_the_last_rank_and_the_next_unnamed_call) {
  Job job(3);
  job.submit_all(tensor(""));
  for (Rank r : {0, 2}) job.submit(r, tensor(""));
  job.report(1, Join{kWorldSet});
  job.submit(2, tensor(""));
  job.report(0, Join{kWorldSet});
  job.publish();
  job.report(2, Join{kWorldSet});
  Joined joined = only<Joined>(job.publish());
  CHECK_EQ(joined.last, 2);
  CHECK_EQ(joined.next_sequence, 3);
  job.resume(joined);
  job.report(0, Done{kWorldSet, 1});
  job.submit_all(tensor(""));
  CHECK_EQ(only<Run>(job.publish()).items[0].sequence, 3);
  for (Rank r : {2, 1, 0}) job.report(r, Join{kWorldSet});
  CHECK_EQ(only<Joined>(job.publish()).last, 0);
}

TEST(a_wrong_join_is_an_error_on_all_when_all_have_joined) {
  Job job(3);
  const Failure wrong{ErrorCode::kWrongType, "rank 1 refused: TypeError"};
  job.report(1, Join{kWorldSet, wrong});
  job.report(0, Join{kWorldSet});
  CHECK(job.publish().empty());
  job.report(2, Join{kWorldSet, {ErrorCode::kInvalidArgument, "later"}});
  Joined joined = only<Joined>(job.publish());
  CHECK_EQ(joined.failure.text, wrong.text);
  CHECK(joined.failure.code == wrong.code);
  for (Rank r : {2, 1, 0}) job.report(r, Join{kWorldSet});
  CHECK(!only<Joined>(job.publish()).failure);
}

TEST(a_new_set_has_no_joined_member) {
  Job job(3);
  job.report(1, Join{kWorldSet});
  for (Rank r : {0, 2}) job.submit(r, add_set_of({0, 1}), no_input());
  const Failure failure = only<Fail>(job.publish()).failure;
  CHECK(failure.code == ErrorCode::kInvalidArgument);
  contains(failure.text, "rank 1 joined, and can't be in a new process set until join() returns");
  for (Rank r : {0, 2}) job.submit(r, form_set_of({0, 2}, "others"), no_input());
  CHECK(only<OpenSet>(job.publish()).ranks == (std::vector<Rank>{0, 2}));
  for (Rank r : {0, 2}) job.report(r, Join{kWorldSet});
  CHECK_EQ(kinds(job.publish()), "joined");
  job.add_set({0, 1});
}

TEST(a_broadcast_whose_root_has_joined_fails) {
  Job job(2);
  Request x = with_op(tensor("x"), Op::kBroadcast);
  x.signature.root = 1;
  job.report(1, Join{kWorldSet});
  job.submit(0, x, no_input());
  Failure failure = only<Fail>(job.publish()).failure;
  CHECK(failure.code == ErrorCode::kInvalidArgument);
  contains(failure.text, "root rank 1 has no tensor because it has joined: choose");
}

TEST(a_mismatch_does_not_blame_a_joined_rank) {
  Job job(3);
  job.report(1, Join{kWorldSet});
  job.submit(0, tensor("x", {1}));
  job.submit(2, tensor("x", {2}));
  contains(only<Fail>(job.publish()).failure.text, "shape is (1,) on rank 0, (2,) on rank 2");
}

}  // namespace farandole
