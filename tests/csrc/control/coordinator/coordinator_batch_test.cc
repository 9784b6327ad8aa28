// SPDX-License-Identifier: Apache-2.0
// The coordinator, rule by rule: batches, and what is irregular in them.
#include <algorithm>

#include "control/coordinator/coordinator_harness.h"

namespace farandole {
namespace {

const std::vector<Request> kThree{tensor("a"), tensor("b"), tensor("c")};

// Ranks that know the ids of three tensors.
Job taught(int size) {
  Job job(size);
  for (const Request& request : kThree) job.submit_all(request);
  job.report(0, Done{kWorldSet, only<Run>(job.publish()).bucket});
  return job;
}

std::vector<std::string> names_of(const Run& run, const Job& job) {
  std::vector<std::string> names;
  for (const Item& item : run.items) names.push_back(job.table().at(item.id).name);
  return names;
}

ReadyMany batch_of(const std::vector<Request>& requests, const Job& job) {
  ReadyMany many;
  for (const Request& request : requests) {
    for (auto& [id, known] : job.table()) {
      if (known.name == request.name) many.ids.add(id);
    }
  }
  return many;
}

}  // namespace

TEST(a_batch_is_the_reports_of_its_calls_in_order) {
  Job job = taught(2);
  job.submit_together(0, kThree);
  CHECK_EQ(kinds(job.publish()), "");
  job.submit(1, tensor("b"));
  job.submit_together(1, {tensor("c"), tensor("a")});
  const Log log = job.publish();
  CHECK_EQ(kinds(log), "run");
  CHECK(names_of(only<Run>(log), job) == (std::vector<std::string>{"b", "c", "a"}));
}

TEST(one_call_of_a_batch_may_be_another_than_its_peers) {
  for (bool batch_first : {true, false}) {
    Job job = taught(2);
    const auto odd = [&] { job.submit(1, tensor("b", {7})); };
    if (!batch_first) odd();
    job.submit_together(0, kThree);
    if (batch_first) odd();
    job.submit_together(1, {tensor("a"), tensor("c")});
    const Log log = job.publish();
    CHECK_EQ(kinds(log), "fail run");
    contains(only<Fail>(log).failure.text, "'b'");
    CHECK(names_of(only<Run>(log), job) == (std::vector<std::string>{"a", "c"}));
  }
}

TEST(a_batch_goes_on_without_ranks_that_have_no_tensor) {
  Job job = taught(3);
  job.submit_together(0, kThree);
  job.submit(1, tensor("b"), no_input());
  job.submit_together(1, {tensor("a"), tensor("c")});
  job.report(2, Join{});
  const Run run = only<Run>(job.publish());
  CHECK_EQ(run.items.size(), 3);
  for (const Item& item : run.items) {
    const bool b = job.table().at(item.id).name == "b";
    CHECK(item.absent == (b ? std::vector<int32_t>{1, 2} : std::vector<int32_t>{2}));
  }
}

TEST(a_refused_call_of_a_batch_fails_alone) {
  Job job = taught(2);
  job.submit_together(0, kThree);
  job.submit_together(1, {tensor("a")});
  job.report(1, Refuse{{kWorldSet, "b", 0}, {ErrorCode::kInvalidArgument, "no"}});
  job.submit_together(1, {tensor("c")});
  CHECK_EQ(kinds(job.publish()), "fail run");
}

TEST(a_batch_after_a_rank_has_left_fails_call_by_call) {
  Job job = taught(2);
  job.report(1, Leave{});
  job.submit_together(0, kThree);
  const Log log = job.publish();
  CHECK_EQ(kinds(log), "fail fail fail");
  for (const Fail& fail : all<Fail>(log)) CHECK(fail.failure.code == ErrorCode::kPeer);
}

TEST(a_batch_that_no_rank_would_send_is_an_error) {
  Job job = taught(2);
  CHECK_THROWS(job.report(0, ReadyMany{{999}}), ErrorCode::kInternal);
  job.submit_together(0, {tensor("a")});
  CHECK_THROWS(job.submit_together(0, {tensor("a")}), ErrorCode::kInternal);
}

// The ranks of a host report a batch at once, whether their calls are regular or not.
TEST(a_host_speaks_for_its_ranks) {
  for (const std::string& irregular : std::vector<std::string>{"", "join", "early", "odd"}) {
    Job job = taught(4);
    const int host = job.coordinator().add_group({2, 3});
    job.submit_together(0, kThree);
    if (irregular == "early") job.submit(2, tensor("b"));
    if (irregular == "join") {
      job.report(1, Join{});
    } else if (irregular == "odd") {
      job.submit(1, tensor("b", {7}));
      job.submit_together(1, {tensor("a"), tensor("c")});
    } else {
      job.submit_together(1, kThree);
    }
    if (irregular == "early") {
      CHECK_THROWS(job.coordinator().receive_all(host, batch_of(kThree, job), 0),
                   ErrorCode::kInternal);  // rank 2 says so twice
      continue;
    }
    job.coordinator().receive_all(host, batch_of(kThree, job), 0);
    const Log log = job.publish();
    CHECK_EQ(kinds(log), irregular == "odd" ? "fail run" : "run");
    const Run run = only<Run>(log);
    CHECK_EQ(run.items.size(), irregular == "odd" ? 2 : 3);
    const std::vector<int32_t> absent(irregular == "join" ? 1 : 0, 1);
    for (const Item& item : run.items) CHECK(item.absent == absent);
  }
}

TEST(a_host_speaks_for_all_of_what_is_alike_only) {
  Job job = taught(4);
  const int host = job.coordinator().add_group({2, 3});
  CHECK_THROWS(job.coordinator().receive_all(host, Join{}, 0), ErrorCode::kInternal);
  CHECK_THROWS(job.coordinator().receive_all(host, ReadyMany{{999}}, 0), ErrorCode::kInternal);
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

}  // namespace farandole
