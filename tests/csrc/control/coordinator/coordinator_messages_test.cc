// SPDX-License-Identifier: Apache-2.0
// The coordinator, rule by rule: sends and receives.
#include "control/coordinator/coordinator_harness.h"

namespace farandole {
namespace {

struct End {
  Rank peer = kAnyRank;
  int64_t tag = 0;
  int64_t elements = 1000;
  DType dtype = DType::kFloat32;
  SetId set = kWorldSet;
};

// The ranks number their posts as they like, so tests see which one an entry means.
Post post_of(Op op, Rank from, uint64_t number, const End& end) {
  Post post;
  post.number = number;
  post.request.set = end.set;
  post.request.peer = end.peer;
  post.request.tag = end.tag;
  Signature& s = post.request.signature;
  s.op = op;
  s.dtype = end.dtype;
  s.shape = {end.elements};
  s.root = op == Op::kSend ? from : end.peer;
  post.contribution.has_input = op == Op::kSend;
  return post;
}

void send(Job& job, Rank from, uint64_t number, const End& end) {
  job.report(from, post_of(Op::kSend, from, number, end));
}
void receive(Job& job, Rank from, uint64_t number, const End& end) {
  job.report(from, post_of(Op::kReceive, from, number, end));
}

void refuse(Job& job, Rank from, uint64_t number, const End& end) {
  Post post = post_of(Op::kSend, from, number, end);
  post.contribution = {};
  post.refusal = kBad;
  job.report(from, post);
}

void check_matched(const Matched& matched, Rank sender, uint64_t sent, Rank receiver,
                   uint64_t received) {
  CHECK_EQ(matched.sender, sender);
  CHECK_EQ(matched.sent, sent);
  CHECK_EQ(matched.receiver, receiver);
  CHECK_EQ(matched.received, received);
}

void check_fail(const Fail& fail, Rank rank, uint64_t number, ErrorCode code,
                const std::string& text) {
  CHECK_EQ(fail.key.poster, rank);
  CHECK_EQ(fail.key.sequence, number);
  CHECK(fail.failure.code == code);
  contains(fail.failure.text, text);
}

}  // namespace

TEST(a_receive_from_any_rank_meets_who_came_first) {
  Job job(4);
  send(job, 3, 0, {.peer = 1, .tag = 2});
  send(job, 0, 0, {.peer = 1, .tag = 2});
  send(job, 2, 0, {.peer = 1, .tag = 3});
  receive(job, 1, 0, {.tag = 2});
  check_matched(only<Matched>(job.publish()), 3, 0, 1, 0);
  receive(job, 1, 1, {.tag = 2});
  check_matched(only<Matched>(job.publish()), 0, 0, 1, 1);
  receive(job, 1, 2, {.tag = 2});  // and a send meets the receive that was first
  receive(job, 1, 3, {.peer = 0, .tag = 2});
  send(job, 0, 1, {.peer = 1, .tag = 2});
  check_matched(only<Matched>(job.publish()), 0, 1, 1, 2);
  receive(job, 1, 4, {.tag = 2});
  send(job, 0, 2, {.peer = 1, .tag = 2});
  check_matched(only<Matched>(job.publish()), 0, 2, 1, 3);
}

TEST(ends_that_disagree_both_fail) {
  Job job(3);
  send(job, 0, 5, {.peer = 2, .tag = 8, .elements = 4});
  receive(job, 2, 6, {.peer = 0, .tag = 8, .elements = 3, .dtype = DType::kInt64});
  const auto fails = all<Fail>(job.publish());
  CHECK_EQ(fails.size(), 2);
  check_fail(fails[0], 0, 5, ErrorCode::kMismatch, "send of rank 0 to rank 2 with tag 8");
  check_fail(fails[1], 2, 6, ErrorCode::kMismatch, "has 3 elements of int64 (24 bytes)");
  contains(fails[1].failure.text, "has 4 elements of float32 (16 bytes)");
}

TEST(a_joined_rank_neither_sends_nor_receives) {
  Job job(3);
  send(job, 1, 0, {.peer = 0, .tag = 1});
  receive(job, 0, 0, {.peer = 1, .tag = 2});
  receive(job, 2, 0, {.tag = 2});
  job.report(1, Join{kWorldSet});
  check_fail(only<Fail>(job.publish()), 0, 0, ErrorCode::kPeer, "rank 1 joined");
  send(job, 0, 1, {.peer = 1});
  check_fail(only<Fail>(job.publish()), 0, 1, ErrorCode::kPeer, "send of rank 0 to rank 1");
  receive(job, 0, 2, {.peer = 1, .tag = 1});  // what it had sent before is there
  check_matched(only<Matched>(job.publish()), 1, 0, 0, 2);
  job.report(0, Join{kWorldSet});
  check_fail(only<Fail>(job.publish()), 2, 0, ErrorCode::kPeer, "ranks 0, 1 joined");
  CHECK_EQ(kinds(job.play("2.")), "joined");
  send(job, 0, 3, {.peer = 1});
  receive(job, 1, 1, {.peer = 0});
  CHECK_EQ(all<Matched>(job.publish()).size(), 1);
}

TEST(a_rank_that_leaves_fails_its_messages_alone) {
  Job job(4);
  send(job, 0, 0, {.peer = 2});
  send(job, 2, 0, {.peer = 1});
  receive(job, 3, 0, {.peer = 1});
  job.report(2, Leave{false, "", false});
  const auto fails = all<Fail>(job.publish());
  CHECK_EQ(fails.size(), 2);
  for (const Fail& fail : fails) CHECK(fail.key.poster == 0 || fail.key.poster == 2);
  send(job, 1, 0, {.peer = 3});
  CHECK_EQ(all<Matched>(job.publish()).size(), 1);
  receive(job, 1, 1, {.peer = 2});
  check_fail(only<Fail>(job.publish()), 1, 1, ErrorCode::kPeer,
             "rank 2 finished normally and left");
}

TEST(a_refused_send_is_told_after_its_rank_has_left) {
  for (Rank named : {0, kAnyRank}) {
    Job job(3);
    refuse(job, 0, 0, {.peer = 1});
    CHECK_EQ(kinds(job.play("0/")), "");
    receive(job, 1, 0, {.peer = named});
    check_fail(only<Fail>(job.publish()), 1, 0, ErrorCode::kWrongType, "bad");
  }
}

TEST(nobody_waits_in_a_refused_message) {
  auto settings = Job::settings(3);
  settings.stall_warn_ns = 10'000'000'000;
  settings.stall_abort_ns = 30'000'000'000;
  Job job(settings);
  refuse(job, 0, 0, {.peer = 1, .tag = 1});
  for (int64_t seconds : {11, 31}) CHECK_EQ(kinds(job.tick(seconds)), "");  // no rank is asked
  receive(job, 1, 0, {.tag = 1});
  check_fail(only<Fail>(job.publish()), 1, 0, ErrorCode::kWrongType, "bad");
}

TEST(pairs_are_no_process_sets_of_users) {
  auto settings = Job::settings(2);
  settings.max_sets = 2;
  Job job(settings);
  send(job, 0, 0, {.peer = 1});
  receive(job, 1, 0, {.peer = 0});
  const SetId pair = only<OpenSet>(job.publish()).set;
  job.submit_all(add_set_of({1}), no_input());  // neither counted nor known
  CHECK_EQ(only<OpenSet>(job.publish()).set, 1);
  job.submit_all(remove_set_of(pair), no_input());
  contains(only<Fail>(job.publish()).failure.text, "can't be removed");
}

TEST(a_message_that_nobody_meets_is_given_up) {
  Job job(Job::impatient(3));
  receive(job, 2, 7, {.peer = 0, .tag = 6});
  receive(job, 1, 8, {.tag = 5});
  job.report(2, Inquire{1, {kWorldSet, "", 7, 2}});
  contains(only<Answer>(job.publish()).text, "receive of rank 2 from rank 0 with tag 6");
  const auto fails = all<Fail>(job.tick(2));
  CHECK_EQ(fails.size(), 2);
  check_fail(fails[0], 1, 8, ErrorCode::kStall, "rank 1 waiting for 2 s, ranks 0, 2 missing");
  check_fail(fails[1], 2, 7, ErrorCode::kStall, "rank 2 waiting for 2 s, rank 0 missing");
  send(job, 0, 0, {.peer = 2, .tag = 6});  // waits for another receive
  CHECK_EQ(kinds(job.publish()), "");
}

TEST(a_message_that_waits_is_told_which_end_the_other_rank_has_posted) {
  const auto told = [](auto&& post_others) {
    Job job(3);
    send(job, 0, 0, {.peer = 1, .tag = 6});
    post_others(job);
    job.report(0, Inquire{1, {kWorldSet, "", 0, 0}});
    return only<Answer>(job.publish()).text;
  };
  contains(told([](Job& job) {
             send(job, 1, 0, {.peer = 2});
             receive(job, 1, 2, {.peer = 0, .tag = 7});
           }),
           "rank 1 waits in receive of rank 1 from rank 0 with tag 7, which rank 0 has not called: "
           "make");
  CHECK(told([](Job& job) { send(job, 1, 0, {.peer = 2}); }).ends_with("rank 1 missing"));
}

TEST(an_impossible_post_breaks_the_protocol) {
  const auto broken = [](const Post& post) {
    CHECK_THROWS(Job(2).report(0, post), ErrorCode::kInternal);
  };
  broken(post_of(Op::kSend, 0, 0, {.peer = 0}));
  broken(post_of(Op::kSend, 0, 0, {.peer = 2}));
  broken(post_of(Op::kSend, 0, 0, {}));
  broken(post_of(Op::kSend, 0, 0, {.peer = 1, .tag = -1}));
  broken(post_of(Op::kSend, 0, 0, {.peer = 1, .elements = -1}));
  broken(post_of(Op::kReceive, 1, 0, {.peer = 0}));
  broken(post_of(Op::kAllreduce, 0, 0, {.peer = 1}));
  Post empty = post_of(Op::kSend, 0, 0, {.peer = 1});
  empty.contribution.has_input = false;
  broken(empty);
}

}  // namespace farandole
