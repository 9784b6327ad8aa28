// SPDX-License-Identifier: Apache-2.0
// The coordinator, rule by rule: unnamed calls that match from different lines of the program.
#include "control/coordinator/coordinator_harness.h"

namespace farandole {
namespace {

const Request kFirst = made_at("train.py:5"), kSecond = made_at("train.py:9");

void submit(Job& job, const std::vector<Request>& by_rank) {
  for (size_t r = 0; r < by_rank.size(); ++r) job.submit(static_cast<Rank>(r), by_rank[r]);
}

TEST(calls_from_one_line_are_not_noticed) {
  Job job(3);
  for (const Request& request : {kFirst, kSecond, kFirst, made_at("")}) {
    job.submit_all(request);
    CHECK(all<Notice>(job.publish()).empty());
  }
  submit(job, {kFirst, made_at(""), kFirst});  // one rank does not know
  CHECK(all<Notice>(job.publish()).empty());
}

TEST(calls_from_different_lines_are_noticed_once) {
  Job job(3);
  submit(job, {kFirst, kFirst, kSecond});
  Log log = job.publish();
  CHECK_EQ(kinds(log), "notice define define run");
  const Notice notice = only<Notice>(log);
  CHECK_EQ(notice.set, kWorldSet);
  contains(notice.text, "unnamed call 1 (allreduce) matches calls from different lines: ");
  contains(notice.text, "train.py:5 on ranks 0, 1, train.py:9 on rank 2");
  submit(job, {kSecond, kFirst, kFirst});  // the same two lines
  CHECK_EQ(kinds(job.publish()), "run");
  submit(job, {kSecond, made_at("eval.py:5"), kSecond});
  contains(only<Notice>(job.publish()).text, "train.py:9 on ranks 0, 2, eval.py:5 on rank 1");
}

// Ranks whose lines always come second get an id, too.
TEST(every_line_gets_an_id) {
  Job job(2);
  submit(job, {kFirst, kSecond});
  job.publish();
  std::set<std::string> lines;
  for (const auto& [id, request] : job.table()) lines.insert(request.site);
  CHECK(lines == (std::set<std::string>{"train.py:5", "train.py:9"}));
  submit(job, {kSecond, kFirst});
  CHECK_EQ(kinds(job.publish()), "run");
}

TEST(small_inputs_are_added_whatever_their_lines) {
  Job job(2);
  const std::vector<float> one{1.5f}, two{2.25f};
  Request first = kFirst, second = kSecond;
  first.signature.shape = second.signature.shape = {1};
  job.submit(0, first, payload(one));
  job.submit(1, second, payload(two));
  CHECK(values_of<float>(only<Result>(job.publish()).payload) == std::vector<float>{3.75f});
}

TEST(calls_from_different_lines_can_be_an_error) {
  Coordinator::Settings settings = Job::settings(2);
  settings.check_sites = true;
  Job job(settings);
  submit(job, {kFirst, kSecond});
  const Fail fail = only<Fail>(job.publish());
  CHECK(fail.failure.code == ErrorCode::kMismatch);
  contains(fail.failure.text, "train.py:5 on rank 0, train.py:9 on rank 1");
  submit(job, {kSecond, kFirst});
  CHECK_EQ(all<Fail>(job.publish()).size(), size_t{1});  // every time
  submit(job, {kFirst, kFirst});
  CHECK_EQ(kinds(job.publish()), "define run");
}

// A group is one call, whose tensors come from one line.
TEST(a_group_from_different_lines_is_noticed_once) {
  for (bool strict : {false, true}) {
    Coordinator::Settings settings = Job::settings(2);
    settings.check_sites = strict;
    Job job(settings);
    for (Rank rank : {0, 1}) {
      job.submit(rank, grouped(rank == 0 ? kFirst : kSecond, 3));
    }
    const Log log = job.publish();
    CHECK_EQ(all<Notice>(log).size(), size_t{strict ? 0u : 1u});
    CHECK_EQ(all<Fail>(log).size(), size_t{strict ? 1u : 0u});
    CHECK_EQ(all<Run>(log).size(), size_t{strict ? 0u : 1u});
  }
}

TEST(a_mismatch_names_the_lines) {
  Job job(2);
  submit(job, {kFirst, made_at("train.py:9", tensor("", {7}))});
  const std::string text = only<Fail>(job.publish()).failure.text;
  contains(text, "shape is (1000,) on rank 0, (7,) on rank 1");
  contains(text, "they call from train.py:5 on rank 0, train.py:9 on rank 1");
}

TEST(a_set_is_told_of_its_own_calls) {
  Job job(3);
  const SetId set = job.add_set({0, 2});
  job.submit(0, in_set(kFirst, set));
  job.submit(2, in_set(kSecond, set));
  const Notice notice = only<Notice>(job.publish());
  CHECK_EQ(notice.set, set);
  contains(notice.text, "train.py:5 on rank 0, train.py:9 on rank 2");
}

}  // namespace
}  // namespace farandole
