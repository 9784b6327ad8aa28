// SPDX-License-Identifier: Apache-2.0
// Predicted groups, from the ranks to the log and back: what a step costs, and every way out.
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "coordinator_harness.h"
#include "runtime/calls/reporter.h"

namespace farandole {
namespace {

// Ranks that submit named tensors through their reporters. A log entry reaches all at once.
class Steps {
 public:
  explicit Steps(int size, int predictions = 2, bool prediction_tiny = true)
      : size_(size), reporters_(size_t(size)), job_([&] {
          Coordinator::Settings settings = Job::settings(size);
          settings.predictions = predictions;
          settings.prediction_bytes = 0;
          settings.prediction_tiny = prediction_tiny;
          return settings;
        }()) {}

  // Tensor t of rank r; its handle is t + 1.
  void submit(Rank r, int t, const Contribution& given = input(),
              std::vector<int64_t> shape = {1000}) {
    Ready ready;
    ready.request = tensor("t" + std::to_string(t), std::move(shape));
    for (auto& [id, known] : job_.table()) {
      if (known.name == ready.request.name && known.signature == ready.request.signature)
        ready.id = id;
    }
    ready.contribution = given;
    if (ready.id != 0) under_way_.insert({r, ready.id});
    send(r, [&](auto& out) { report_combiner(r).pass(Report(ready), t + 1, out); });
  }
  void submit_all(int t) {
    for (Rank r = 0; r < size_; ++r) submit(r, t, input(), {elements_});
  }
  void make_tensors_of(int64_t elements) { elements_ = elements; }
  void await(Rank r, int t) {
    int64_t handle = t + 1;
    send(r, [&](auto& out) { report_combiner(r).await({&handle, 1}, out); });
  }
  void report(Rank r, const Report& report) {
    send(r, [&](auto& out) { report_combiner(r).pass(Report(report), 0, out); });
  }
  Log publish() { return read(job_.publish()); }
  Log tick_at(int64_t seconds) {
    job_.at(seconds);
    return read(job_.tick());
  }
  // All tensors by all ranks; what the log says.
  Log step(int tensors) {
    Log log;
    for (int t = 0; t < tensors; ++t) submit_all(t);
    for (Log part = publish(); !part.empty(); part = publish()) {
      log.insert(log.end(), part.begin(), part.end());
    }
    return log;
  }
  // Until there are predictions.
  void learn(int tensors) {
    for (int i = 0; i < 3; ++i) step(tensors);
    CHECK(job_.coordinator().predictions() > 0);
  }
  int reports() const { return job_.reports(); }
  Job& job() { return job_; }
  ReportCombiner& report_combiner(Rank r) { return reporters_[static_cast<size_t>(r)]; }

 private:
  void send(Rank r, const std::function<void(std::vector<Report>&)>& make) {
    std::vector<Report> out;
    make(out);
    for (const Report& report : out) job_.report(r, report);
  }
  Log read(Log log) {
    for (const Entry& entry : log) {
      for (Rank r = 0; r < size_; ++r) {
        auto under_way = [&](uint32_t id) { return under_way_.contains({r, id}); };
        if (auto* prediction = std::get_if<Predict>(&entry))
          report_combiner(r).open(*prediction, under_way);
        if (auto* gone = std::get_if<Dissolve>(&entry)) {
          send(r, [&](auto& out) { report_combiner(r).close(gone->id, out); });
        }
      }
      if (auto* run = std::get_if<Run>(&entry)) settle(*run);  // its bytes move at once
      if (auto* result = std::get_if<Result>(&entry)) over({result->id});
    }
    return log;
  }
  void settle(const Run& run) {
    job_.report(0, Done{run.set, run.bucket});
    std::vector<uint32_t> ids;
    for (const Item& item : run.items) ids.push_back(item.id);
    for (uint32_t prediction : run.predictions) {
      for (uint32_t id : report_combiner(0).ids_of(prediction)) ids.push_back(id);
    }
    over(ids);
  }
  void over(const std::vector<uint32_t>& ids) {
    for (uint32_t id : ids) std::erase_if(under_way_, [&](auto& key) { return key.second == id; });
  }

  int size_;
  int64_t elements_ = 1000;
  std::vector<ReportCombiner> reporters_;
  Job job_;
  std::set<std::pair<Rank, uint32_t>> under_way_;
};

size_t calls_in(const Run& run, Steps& steps) {
  size_t calls = run.items.size();
  for (uint32_t prediction : run.predictions)
    calls += steps.report_combiner(0).ids_of(prediction).size();
  return calls;
}

}  // namespace

TEST(a_repeated_step_costs_a_report_a_prediction) {
  Steps steps(3);
  steps.learn(10);
  CHECK_EQ(steps.job().coordinator().predictions(), size_t{2});
  int before = steps.reports();
  Log log = steps.step(10);
  size_t calls = 0, runs = 0;
  for (const Run& run : all<Run>(log)) {
    CHECK(run.items.empty());
    calls += calls_in(run, steps);
    ++runs;
  }
  CHECK_EQ(calls, size_t{10});
  CHECK_EQ(static_cast<size_t>(steps.reports() - before), 3 * 2 + runs);  // and Done
}

TEST(a_prediction_starts_before_the_step_ends_and_when_all_are_ready) {
  Steps steps(2);
  steps.learn(4);
  for (int t : {1, 0}) steps.submit(0, t);
  for (int t : {0, 1, 2}) steps.submit(1, t);  // in another order
  CHECK_EQ(kinds(steps.publish()), "run");
  steps.submit(1, 3);
  CHECK_EQ(kinds(steps.publish()), "");
}

TEST(prediction_can_be_switched_off) {
  Steps steps(2, 0);
  for (int i = 0; i < 5; ++i) steps.step(4);
  CHECK_EQ(steps.job().coordinator().predictions(), size_t{0});
}

TEST(a_wait_for_a_part_sends_it_and_ends_later_predictions_there) {
  Steps steps(2, 1);
  steps.learn(4);
  for (Rank r : {0, 1}) {
    steps.submit(r, 0);
    steps.submit(r, 1);
  }
  CHECK_EQ(kinds(steps.publish()), "");
  steps.await(0, 1);  // rank 1 waits for nothing, and yet is heard of
  CHECK_EQ(kinds(steps.publish()), "dissolve");
  CHECK_EQ(only<Run>(steps.publish()).items.size(), size_t{2});
  for (int t : {2, 3}) steps.submit_all(t);
  CHECK_EQ(only<Run>(steps.publish()).items.size(), size_t{2});
  CHECK_EQ(steps.job().coordinator().predictions(), size_t{0});
  for (int i = 0; i < 3; ++i) steps.step(4);
  CHECK_EQ(steps.job().coordinator().predictions(), size_t{2});
  for (int t : {0, 1}) steps.submit_all(t);
  Run run = only<Run>(steps.publish());
  CHECK_EQ(calls_in(run, steps), size_t{2});
}

// Who waits once more where predictions end already teaches nothing.
TEST(a_wait_for_the_last_call_first_delays_the_next_prediction) {
  Steps steps(2, 1);
  steps.learn(4);
  auto wait_for_b_after = [&](int other, std::vector<int> rest) {
    for (int t : {other, 1}) steps.submit_all(t);
    steps.await(0, 1);
    while (!steps.publish().empty()) {
    }
    for (int t : rest) steps.submit_all(t);
    while (!steps.publish().empty()) {
    }
  };
  wait_for_b_after(0, {2, 3});
  for (int i = 0; i < 3; ++i) steps.step(4);
  CHECK_EQ(steps.job().coordinator().predictions(), size_t{2});  // ab, cd
  wait_for_b_after(2, {0, 3});
  for (int i = 0; i < 3; ++i) steps.step(4);
  CHECK_EQ(steps.job().coordinator().predictions(), size_t{1});  // looks twice as long
  for (int i = 0; i < 2; ++i) steps.step(4);
  CHECK_EQ(steps.job().coordinator().predictions(), size_t{2});
}

// Inputs that could ride along: many of them are worth a prediction, a few are not.
TEST(a_step_of_many_tiny_calls_is_predicted) {
  struct Case {
    int calls;
    bool allowed;
    size_t predictions;
  };
  for (const Case& now : {Case{7, true, 0}, {8, true, 1}, {8, false, 0}, {300, true, 2}}) {
    Steps steps(2, 1, now.allowed);
    steps.make_tensors_of(16);
    for (int i = 0; i < 3; ++i) steps.step(now.calls);
    CHECK_EQ(steps.job().coordinator().predictions(), now.predictions);
  }
}

// Of 12 calls every third rides along with its reports, and overtakes what waits for the lane.
TEST(predictions_hold_calls_in_the_order_in_which_they_become_ready) {
  Steps steps(2, 3);
  const std::vector<float> few(16, 1.0f);
  for (int step = 0; step < 3; ++step) {
    for (int t = 0; t < 12; ++t) {
      for (Rank r : {0, 1}) {
        steps.submit(r, t, t % 3 == 0 ? payload(few) : input(), {t % 3 == 0 ? 16 : 1000});
      }
    }
    while (!steps.publish().empty()) {
    }
  }
  std::vector<std::string> names, expected;
  for (uint32_t prediction : {1u, 2u, 3u}) {
    for (uint32_t id : steps.report_combiner(0).ids_of(prediction))
      names.push_back(steps.job().table().at(id).name);
  }
  for (int t = 0; t < 12; ++t) expected.push_back("t" + std::to_string(t));
  CHECK(names == expected);
}

// Both ranks wait in the middle at once: that is one lesson.
TEST(a_wait_of_all_ranks_costs_no_trust) {
  Steps steps(2, 1);
  steps.learn(4);
  for (int t : {0, 1}) steps.submit_all(t);
  for (Rank r : {0, 1}) steps.await(r, 1);
  while (!steps.publish().empty()) {
  }
  for (int t : {2, 3}) steps.submit_all(t);
  while (!steps.publish().empty()) {
  }
  for (int i = 0; i < 3; ++i) steps.step(4);
  CHECK_EQ(steps.job().coordinator().predictions(), size_t{2});
}

// Rank 0 is always ahead: whenever the last call of a step is published it has begun the next one.
TEST(predictions_are_made_in_the_middle_of_a_round) {
  Steps steps(2, 1);
  steps.submit(0, 0);
  size_t whole = 0;
  for (int step = 0; step < 6; ++step) {
    for (int t : {1, 2, 3, 0}) {
      steps.submit(0, t);
      steps.submit(1, (t + 3) % 4);
      for (const Run& run : all<Run>(steps.publish())) whole += run.predictions.size();
    }
  }
  CHECK_EQ(whole, size_t{2});  // the last two rounds; in the one before it was made
}

// Rank 1 will submit the rest only when rank 0 has what it waits for: nobody here can see that.
TEST(nothing_is_withheld_for_long_from_a_rank_that_is_ready) {
  Steps steps(2, 1);
  steps.learn(2);
  steps.submit(1, 0);
  steps.submit(0, 0);
  steps.submit(0, 1);  // the whole prediction
  CHECK_EQ(kinds(steps.publish()), "");
  CHECK(steps.job().coordinator().next_tick() <= 1'000'000'000);
  CHECK_EQ(kinds(steps.tick_at(1)), "dissolve");
  CHECK_EQ(only<Run>(steps.publish()).items.size(), size_t{1});
  steps.submit(1, 1);
  CHECK_EQ(only<Run>(steps.publish()).items.size(), size_t{1});
}

TEST(every_deviation_ends_prediction_and_nothing_else) {
  const std::vector<std::pair<const char*, std::function<void(Steps&)>>> deviations = {
      {"no input", [](Steps& s) { s.submit(1, 1, no_input()); }},
      {"a changed request on both",
       [](Steps& s) {
         s.submit(0, 1, input(), {7});
         s.submit(1, 1, input(), {7});
       }},
      {"a refusal",
       [](Steps& s) {
         s.report(1, Refuse{{kWorldSet, "t1", 0}, {ErrorCode::kWrongType, "refused"}});
       }},
      {"a join", [](Steps& s) { s.report(1, Join{kWorldSet}); }},
  };
  for (auto& [what, deviate] : deviations) {
    std::fprintf(stderr, "     %s\n", what);
    Steps steps(2, 1);
    steps.learn(3);
    steps.submit(0, 0);
    steps.submit(1, 0);
    deviate(steps);
    steps.submit(0, 2);
    Log log;
    for (int i = 0; i < 3; ++i) {
      Log part = steps.publish();
      log.insert(log.end(), part.begin(), part.end());
    }
    CHECK(std::holds_alternative<Dissolve>(log.front()));
    CHECK_EQ(steps.report_combiner(0).withheld(), 0);
    CHECK_EQ(steps.report_combiner(1).withheld(), 0);
    bool first = false;  // what both had submitted has run
    for (const Run& run : all<Run>(log)) {
      for (const Item& item : run.items) first |= steps.job().table().at(item.id).name == "t0";
    }
    CHECK(first);
    CHECK_EQ(steps.job().coordinator().predictions(), size_t{0});
  }
}

TEST(a_rank_that_leaves_ends_prediction) {
  Steps steps(2, 1);
  steps.learn(3);
  for (int t : {0, 1, 2}) steps.submit(0, t);
  steps.report(1, Leave{});
  Log log = steps.publish();
  CHECK_EQ(all<Dissolve>(log).size(), size_t{1});
  CHECK_EQ(all<Fail>(log).size(), size_t{3});
  for (const Fail& fail : all<Fail>(log)) contains(fail.failure.text, "rank 1 finished normally");
}

TEST(both_ways_of_reporting_meet_in_one_round) {
  Job job(2);
  for (int step = 0; step < 3; ++step) {
    for (const char* name : {"a", "b"}) job.submit_all(tensor(name));
    for (const Run& run : all<Run>(job.publish())) job.report(0, Done{run.set, run.bucket});
    job.publish();
  }
  CHECK_EQ(job.coordinator().predictions(), size_t{1});
  job.report(0, ReadyAll{1});
  job.submit(1, tensor("a"));  // had not read of it
  CHECK_EQ(only<Run>(job.publish()).items.size(), size_t{1});
  job.submit(1, tensor("b"));
  Run run = only<Run>(job.publish());
  CHECK_EQ(run.items.size(), size_t{1});
  job.report(0, Done{run.set, run.bucket});
  job.report(1, ReadyAll{1});
  job.report(0, ReadyAll{1});
  CHECK_EQ(only<Run>(job.publish()).predictions.size(), size_t{1});
}

TEST(a_rank_that_breaks_the_rules_is_found_out) {
  auto fails = [](const std::function<void(Job&)>& act) {
    Job job(2);
    for (int step = 0; step < 3; ++step) {
      for (const char* name : {"a", "b"}) job.submit_all(tensor(name));
      job.publish();
      job.report(0, Done{kWorldSet, static_cast<uint64_t>(step) + 1});
    }
    job.publish();
    try {
      act(job);
    } catch (const Error& error) {
      CHECK_EQ(error.code(), ErrorCode::kInternal);
      return true;
    }
    return false;
  };
  CHECK(fails([](Job& job) { job.report(0, ReadyAll{9}); }));
  CHECK(fails([](Job& job) { job.report(0, Withdraw{1, false, {2}}); }));
  CHECK(fails([](Job& job) { job.report(0, Withdraw{1, false, {-1}}); }));
  CHECK(fails([](Job& job) { job.report(0, Withdraw{1, true, {}}); }));
  CHECK(fails([](Job& job) {
    job.report(0, ReadyAll{1});
    job.report(0, ReadyAll{1});
  }));
  CHECK(fails([](Job& job) {
    job.report(0, Withdraw{1, false, {}});
    job.report(0, Withdraw{1, false, {}});
  }));
  CHECK(!fails([](Job& job) { job.report(0, ReadyAll{1}); }));
}

}  // namespace farandole
