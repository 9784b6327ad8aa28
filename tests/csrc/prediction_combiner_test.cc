// SPDX-License-Identifier: Apache-2.0
// What a rank withholds of its reports where a group is predicted.
#include <vector>

#include "check.h"
#include "runtime/calls/reporter.h"

using namespace farandole;

// A round may have begun when the prediction comes: some of it was reported call by call.
TEST(a_rank_that_has_begun_the_round_ends_it_call_by_call) {
  ReportCombiner report_combiner;
  report_combiner.open({1, kWorldSet, {5, 6, 7}}, [](uint32_t id) { return id == 6; });
  auto sent = [&](uint32_t id) {
    Ready ready;
    ready.id = id;
    ready.contribution.has_input = true;
    std::vector<Report> out;
    report_combiner.pass(Report(ready), id, out);
    return out;
  };
  for (uint32_t id : {7, 5}) CHECK(std::holds_alternative<Ready>(sent(id).at(0)));
  for (uint32_t id : {6, 7}) CHECK(sent(id).empty());
  CHECK(std::holds_alternative<ReadyAll>(sent(5).at(0)));
}

// Else the coordinator would take this rank's withheld tensors for those of one that has joined, or left.
TEST(no_report_that_ends_calls_overtakes_withheld_ones) {
  for (const Report& last : {Report(Join{}), Report(Refuse{}), Report(Leave{})}) {
    ReportCombiner report_combiner;
    report_combiner.open({1, kWorldSet, {5, 6}}, [](uint32_t) { return false; });
    Ready ready;
    ready.id = 6;
    ready.contribution.has_input = true;
    std::vector<Report> out;
    report_combiner.pass(Report(ready), 1, out);
    CHECK(out.empty());
    report_combiner.pass(Report(last), 0, out);
    CHECK_EQ(out.size(), size_t{2});
    CHECK(std::get<Withdraw>(out[0]).ready == std::vector<int32_t>{1});
    CHECK_EQ(out[1].index(), last.index());
  }
}
