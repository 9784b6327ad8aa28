// SPDX-License-Identifier: Apache-2.0
// The coordinator, rule by rule: process sets and joining.
#include "control/coordinator/coordinator_harness.h"

namespace farandole {
namespace {

SetId add(Job& job, const std::vector<int64_t>& ranks) {
  job.submit_all(add_set_of(ranks), no_input());
  return only<OpenSet>(job.publish()).set;
}

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
  SetId set = add(job, {0, 2});
  contains(refused_set(job, {0, 2}).text, "exists already, with id " + std::to_string(set));
  contains(refused_set(job, {0, 1, 2}).text, "exists already, with id 0");
}

TEST(sets_are_limited) {
  auto settings = Job::settings(3);
  settings.max_sets = 3;
  Job job(settings);
  add(job, {0});
  SetId second = add(job, {1});
  contains(refused_set(job, {2}).text, "FARANDOLE_PROCESS_SETS");
  job.submit_all(remove_set_of(second), no_input());
  job.publish();
  add(job, {2});
}

TEST(only_a_set_that_is_there_can_be_removed) {
  Job job(2);
  SetId set = add(job, {0});
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
  SetId set = add(job, {0});
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
  contains(fail.failure.text, "'form' is a process set of ranks 0, 1 already");
}

TEST(overlapping_sets_do_not_wait_for_each_other) {
  Job job(3);
  SetId left = add(job, {0, 1}), right = add(job, {1, 2});
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
  add(job, {0, 1});
}

TEST(a_broadcast_whose_root_has_joined_fails) {
  Job job(2);
  Request x = with_op(tensor("x"), Op::kBroadcast);
  x.signature.root = 1;
  job.report(1, Join{kWorldSet});
  job.submit(0, x, no_input());
  Failure failure = only<Fail>(job.publish()).failure;
  CHECK(failure.code == ErrorCode::kInvalidArgument);
  contains(failure.text, "root rank 1 brings no tensor, because it has joined: choose");
}

TEST(a_mismatch_does_not_blame_a_joined_rank) {
  Job job(3);
  job.report(1, Join{kWorldSet});
  job.submit(0, tensor("x", {1}));
  job.submit(2, tensor("x", {2}));
  contains(only<Fail>(job.publish()).failure.text, "shape is (1,) on rank 0, (2,) on rank 2");
}

TEST(a_group_that_cannot_fill_any_more_fails_at_the_join) {
  Job job(2);
  job.submit_all(grouped(tensor("x"), "g", 2));
  job.report(0, Join{kWorldSet});
  CHECK_EQ(kinds(job.publish()), "");
  job.report(1, Join{kWorldSet});
  Log log = job.publish();
  CHECK_EQ(kinds(log), "fail joined");
  contains(only<Fail>(log).failure.text, "group 'g'");
}

}  // namespace farandole
