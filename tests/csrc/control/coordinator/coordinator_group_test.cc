// SPDX-License-Identifier: Apache-2.0
// Groups of which ranks bring more, or less, or nothing.
#include "control/coordinator/coordinator_harness.h"

namespace farandole {
namespace {

// Like the ranks: the first goes by the name of the group, or has its place in the order.
std::vector<Request> group_of(const std::string& name, int size) {
  std::vector<Request> calls;
  for (int i = 0; i < size; ++i) {
    const std::string own = i == 0 || name.empty()
                                ? name
                                : name + "_" + std::to_string(i + 1) + "of" + std::to_string(size);
    calls.push_back(grouped(tensor(own), name.empty() ? "unnamed group" : name, size));
  }
  return calls;
}

void submit_member(Job& job, Rank rank, const Request& call, int place, uint64_t number) {
  Ready ready;
  ready.request = call;
  ready.contribution = input();
  const bool unnamed = call.name.empty();
  if (unnamed) ready.sequence = number + (static_cast<uint64_t>(place) << kFollowerShift);
  job.report(rank, ready);
}

void submit_group(Job& job, Rank rank, const std::string& name, int size) {
  const std::vector<Request> calls = group_of(name, size);
  for (int i = 0; i < size; ++i) submit_member(job, rank, calls[static_cast<size_t>(i)], i, 0);
}

}  // namespace

TEST(a_group_of_which_ranks_bring_more_or_less_fails_as_a_whole) {
  for (const char* name : {"g", ""}) {
    Job job(3);
    submit_group(job, 0, name, 3);
    submit_group(job, 1, name, 2);
    CHECK_EQ(kinds(job.publish()), "");
    const auto calls = group_of(name, 3);
    submit_member(job, 2, calls[0], 0, 0);
    submit_member(job, 2, calls[1], 1, 0);
    CHECK_EQ(kinds(job.publish()), "");  // rank 2 has one more to report: who fails may begin anew
    submit_member(job, 2, calls[2], 2, 0);
    const Log log = job.publish();
    CHECK_EQ(kinds(log), *name ? "fail fail fail fail" : "fail fail fail");
    for (const Fail& fail : all<Fail>(log)) {
      contains(fail.failure.text, "group size is 3 on ranks 0, 2, 2 on rank 1");
    }
    Request again = tensor(name);
    if (*name) job.submit_all(again);
    if (*name) CHECK_EQ(kinds(job.publish()), "define run");
  }
}

// Whoever waits for the group may use its names again when the first call has failed.
TEST(the_first_call_of_a_group_fails_last) {
  for (const char* name : {"g", ""}) {
    for (size_t wrong : {0, 1, 2}) {
      Job job(2);
      auto others = group_of(name, 3);
      others[wrong].signature.shape = {7};
      submit_group(job, 0, name, 3);
      submit_member(job, 1, others[0], 0, 0);
      submit_member(job, 1, others[1], 1, 0);
      CHECK_EQ(kinds(job.publish()), wrong < 2 ? "fail" : "");
      submit_member(job, 1, others[2], 2, 0);
      const auto fails = all<Fail>(job.publish());
      CHECK_EQ(fails.size(), wrong < 2 ? size_t{2} : size_t{3});
      for (const Fail& fail : fails) contains(fail.failure.text, "shape is");
      CHECK_EQ(fails.back().key.name, name);
      CHECK_EQ(fails.back().key.index_in_group(), uint64_t{0});
    }
  }
}

TEST(refusing_the_first_call_of_a_group_refuses_the_group) {
  for (const char* name : {"g", ""}) {
    for (bool first : {true, false}) {
      Job job(3);
      const Refuse refusal{{kWorldSet, name, 0}, {ErrorCode::kWrongType, "bad"}};
      if (first) job.report(2, refusal);
      submit_group(job, 0, name, 3);
      submit_group(job, 1, name, 3);
      if (!first) job.report(2, refusal);
      const auto fails = all<Fail>(job.publish());
      CHECK_EQ(fails.size(), size_t{3});
      for (const Fail& fail : fails) {
        CHECK_EQ(fail.failure.text, "bad");
        const bool leads = fail.key.index_in_group() == 0 && fail.key.name == name;
        CHECK_EQ(fail.unheard.size(), leads ? size_t{0} : size_t{1});
      }
    }
  }
}

TEST(a_group_without_members_meets_one_with_some) {
  Job job(2);
  Request none = with_op(tensor("g", {}), Op::kBarrier);
  none.signature.group_size = 0;
  job.submit_all(none);
  CHECK_EQ(kinds(job.publish()), "define result");
  job.submit(0, none);
  submit_group(job, 1, "g", 2);
  for (const Fail& fail : all<Fail>(job.publish())) {
    contains(fail.failure.text, "group size is 0 on rank 0, 2 on rank 1");
  }
  job.submit(0, none);
  job.submit(1, tensor("g"));
  contains(only<Fail>(job.publish()).failure.text, "group size is 0 on rank 0, 1 on rank 1");
}

TEST(a_join_after_refusing_a_group_does_not_complete_it) {
  Job job(3);
  submit_group(job, 0, "g", 2);
  job.report(2, Refuse{{kWorldSet, "g", 0}, {ErrorCode::kWrongType, "bad"}});
  job.report(2, Join{kWorldSet});
  CHECK_EQ(kinds(job.publish()), "");
  submit_group(job, 1, "g", 2);
  CHECK_EQ(kinds(job.publish()), "fail fail");
}

}  // namespace farandole
