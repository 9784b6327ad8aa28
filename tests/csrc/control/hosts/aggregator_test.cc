// SPDX-License-Identifier: Apache-2.0
// When a host's leader speaks: what it keeps back, for how long, and what goes at once. That nothing is lost
// on the way is the simulator's to show.
#include "control/hosts/aggregator.h"

#include <algorithm>
#include <vector>

#include "check.h"

namespace farandole {
namespace {

constexpr int64_t kMs = 1'000'000;
const Contribution kPlain{true, false, 0, {}, {}};

Request named(uint32_t id) {
  Request request;
  request.name = std::to_string(id);
  return request;
}

// The leader of ranks 2 and 3 in a world of four; all times in nanoseconds.
class Leader {
 public:
  explicit Leader(bool gathers_above = false) : aggregator_(4, {2, 3}, gathers_above) {
    for (uint32_t id = 1; id <= 2000; ++id) aggregator_.read(Define{id, named(id)});
  }

  void report(Rank from, const Report& report, int64_t now) {
    ByteString bytes;
    encode(report, bytes);
    aggregator_.receive(from, bytes, now);
  }
  void ready(uint32_t id, int64_t now) {
    for (Rank r : {2, 3}) report(r, ReadyMany{{id}}, now);
  }
  void read(const Entry& entry) { aggregator_.read(entry); }
  // What leaves now.
  std::vector<Report> message(int64_t now) {
    aggregator_.tick(now);
    std::vector<Report> records;
    const ByteString message = aggregator_.take(now);
    if (message.empty()) return records;
    for_each_record(message, {2, 3}, [&](const auto& ranks, ByteView report) {
      records.push_back(decode_report(report));
      speakers_.push_back(ranks);
    });
    return records;
  }
  // How many reports leave now, each of the calls of a batch counted.
  int take(int64_t now) {
    size_t reports = 0;
    for (const Report& report : message(now)) {
      const auto* many = std::get_if<ReadyMany>(&report);
      reports += many ? many->ids.size() : 1;
    }
    return static_cast<int>(reports);
  }
  // Who makes the reports that have left so far; none: all.
  const std::vector<std::vector<Rank>>& speakers() const { return speakers_; }
  int64_t next_tick() const { return aggregator_.next_tick(); }

 private:
  Aggregator aggregator_;
  std::vector<std::vector<Rank>> speakers_;
};

TEST(a_report_after_a_pause_is_sent_at_once) {
  Leader leader;
  for (int64_t now = 0; now < 500 * kMs; now += 20 * kMs) {
    leader.ready(1, now);
    CHECK_EQ(leader.take(now), 1);
    CHECK_EQ(leader.next_tick(), INT64_MAX);
  }
}

// Every rank that waits asks; any entry of the log answers all.
TEST(one_question_for_a_sign_of_life_is_on_its_way) {
  Leader leader;
  for (int64_t now : {0 * kMs, 100 * kMs}) {
    for (Rank r : {2, 3, 3}) leader.report(r, Inquire{}, now);
    CHECK_EQ(leader.take(now), 1);
    leader.report(2, Inquire{}, now + kMs);
    CHECK_EQ(leader.take(now + kMs), 0);
    leader.read(Answer{});
  }
  for (Rank r : {2, 3}) leader.report(r, Inquire{7, {}}, 200 * kMs);  // about their calls
  CHECK_EQ(leader.take(200 * kMs), 2);
}

TEST(a_step_of_a_thousand_tensors_costs_few_messages) {
  for (int tensors : {100, 161, 1000, 2000}) {
    Leader leader;
    const int64_t step = 100 * kMs;
    int messages = 0, reports = 0, oldest = 0;
    int64_t longest = 0;
    auto serve = [&](int64_t now) {
      const int sent = leader.take(now);
      messages += sent > 0;
      reports += sent;
      if (sent == 0) return;
      longest = std::max(longest, now - step * oldest / tensors);
      oldest += sent;
    };
    for (int i = 0; i < tensors; ++i) {
      const int64_t now = step * i / tensors;
      while (leader.next_tick() < now) serve(leader.next_tick());
      leader.ready(static_cast<uint32_t>(i + 1), now);
      serve(now);
    }
    while (leader.next_tick() != INT64_MAX) serve(leader.next_tick());
    CHECK_EQ(reports, tensors);
    CHECK_EQ(leader.speakers().size(), static_cast<size_t>(messages));  // one record each
    CHECK(messages <= 20);
    CHECK(longest <= Aggregator::kLongestGatherNs);
  }
}

TEST(nothing_is_kept_back_while_a_user_waits) {
  Leader leader;
  leader.ready(1, 0);
  CHECK_EQ(leader.take(0), 1);
  leader.ready(2, 10);
  leader.ready(3, 20);
  CHECK_EQ(leader.take(20), 0);
  CHECK_EQ(leader.next_tick(), Aggregator::kShortestGatherNs);
  leader.report(3, Expedite{}, 30);
  CHECK(leader.next_tick() <= 30);
  CHECK_EQ(leader.take(30), 2);
  for (uint32_t id = 4; id < 20; ++id) {
    Ready ready;
    ready.id = id;
    ready.contribution = {true, true, 0, {}, {}};  // with payloads: two records in one message
    leader.report(2, ready, 40 + id);
    leader.report(2, Expedite{}, 40 + id);
    CHECK_EQ(leader.take(40 + id), 0);
    leader.report(3, ready, 40 + id);
    CHECK_EQ(leader.take(40 + id), 2);
  }
  leader.ready(20, 100);  // neither waits any more
  CHECK_EQ(leader.take(100), 0);
}

TEST(a_report_that_is_not_ready_sends_what_waits) {
  Leader leader;
  leader.ready(1, 0);
  CHECK_EQ(leader.take(0), 1);
  leader.ready(2, 10);
  leader.report(2, Done{kWorldSet, 1, false}, 20);
  CHECK_EQ(leader.take(20), 2);
  leader.ready(3, 30);
  CHECK_EQ(leader.take(30), 0);
  leader.report(3, Leave{true, "gone", false}, 40);
  CHECK_EQ(leader.take(40), 2);
}

// Ranks may cut their batches differently: what all have reported leaves together, and each id once.
TEST(batches_leave_when_all_ranks_have_sent_them) {
  Leader leader;
  leader.report(2, ReadyMany{{7, 8, 9, 3}}, 0);
  CHECK_EQ(leader.take(0), 0);
  leader.report(3, ReadyMany{{9, 8}}, 0);
  leader.report(3, ReadyMany{{12}}, 0);
  std::vector<Report> message = leader.message(0);
  CHECK_EQ(message.size(), size_t{1});
  CHECK(std::get<ReadyMany>(message[0]).ids == (IdRuns{9, 8}));
  CHECK(leader.speakers().back().empty());  // all
  Ready empty;                              // the same call without an input
  empty.id = 7;
  leader.report(3, empty, kMs);
  message = leader.message(kMs);
  CHECK_EQ(message.size(), size_t{2});
  CHECK_EQ(std::get<Ready>(message[0]).id, uint32_t{7});
  CHECK(leader.speakers()[1] == std::vector<Rank>{3});
  CHECK(std::get<ReadyMany>(message[1]).ids == IdRuns{7});
  CHECK(leader.speakers()[2] == std::vector<Rank>{2});
  CHECK_EQ(leader.take(Aggregator::kPatienceNs), 2);  // each of one rank
  CHECK(leader.speakers()[3] == std::vector<Rank>{2} &&
        leader.speakers()[4] == std::vector<Rank>{3});
}

// An Expedite is of use where somebody gathers; to the root it would be one message more.
TEST(an_expedite_is_forwarded_where_the_host_above_batches) {
  for (bool gathers_above : {false, true}) {
    Leader leader(gathers_above);
    leader.report(2, Expedite{}, 0);
    CHECK_EQ(leader.take(0), gathers_above ? 1 : 0);
    leader.report(3, Expedite{}, 0);  // that one is known to hurry
    CHECK_EQ(leader.take(0), 0);
  }
}

// To the host above, a rank that says that it is ready for something does not wait.
TEST(an_expedite_follows_reports_held_for_another_rank) {
  Leader leader(true);
  leader.report(2, ReadyMany{{1}}, 0);
  leader.report(2, Expedite{}, 0);
  CHECK_EQ(leader.take(0), 1);
  leader.report(3, ReadyMany{{1}}, 0);
  const std::vector<Report> message = leader.message(0);
  CHECK_EQ(message.size(), size_t{2});
  CHECK(std::holds_alternative<ReadyMany>(message[0]));
  CHECK(std::holds_alternative<Expedite>(message[1]));
}

TEST(a_payload_waits_for_the_other_ranks) {
  Leader leader;
  Ready ready;
  ready.id = 1;
  ready.contribution = {true, true, 0, {}, {}};
  leader.report(2, ready, 0);
  CHECK_EQ(leader.take(0), 0);
  CHECK_EQ(leader.next_tick(), Aggregator::kPatienceNs);
  CHECK_EQ(leader.take(Aggregator::kPatienceNs), 1);
}

// A rank that is later than its neighbor's report could wait does not wait in turn.
TEST(a_late_report_goes_up_at_once) {
  const int64_t late = Aggregator::kPatienceNs + 40 * kMs;
  Leader leader;
  int64_t now = 0;
  // After each of these ends, the ranks' next reports wait for each other again.
  const std::vector<Entry> ends = {Run{kWorldSet, 0, {}, {1}}, Run{kWorldSet, 0, {{1}}},
                                   Result{kWorldSet, 1, 0, true, {}, {}}};
  for (bool both : {true, false}) {
    for (const Entry& end : ends) {
      leader.report(2, ReadyMany{{1}}, now);
      CHECK_EQ(leader.take(now), 0);
      now += Aggregator::kPatienceNs;
      CHECK_EQ(leader.take(now), 1);
      now += late;
      if (both) {
        leader.report(3, ReadyMany{{1}}, now);
        CHECK_EQ(leader.take(now), 1);
      }
      leader.read(end);
      now += late;
    }
  }
  leader.read(
      Fail{{kWorldSet, "1"}, {}});  // the other rank may have reported its next call already
  leader.report(3, ReadyMany{{1}}, now);
  CHECK_EQ(leader.take(now), 1);
  leader.read(Run{kWorldSet, 0, {}, {1}});
  now += late;
  leader.report(2, ReadyMany{{1, 2}}, now);
  CHECK_EQ(leader.take(now), 0);
  leader.report(2, Refuse{{kWorldSet, "3"}, {}}, now);  // what it has reported goes first
  CHECK_EQ(leader.take(now), 3);
  leader.report(3, ReadyMany{{1, 2}}, now + late);
  CHECK_EQ(leader.take(now + late), 2);
  CHECK_EQ(leader.next_tick(), INT64_MAX);
}

// Ranks may report one call in two ways: the first before its Define, without an id, the last after it.
TEST(no_report_waits_for_one_that_went_up_another_way) {
  constexpr int64_t kPause = 2 * Aggregator::kLongestGatherNs;
  Leader leader;
  Request request;  // no name
  request.site = "train.py:7";
  const uint32_t id = 2001;
  int64_t now = 0;
  for (uint64_t sequence : {0, 1}) {
    leader.report(2, Ready{0, request, sequence}, now += kPause);
    CHECK_EQ(leader.take(now), 1);
  }
  leader.report(3, Ready{0, request, 0}, now += kPause);
  CHECK_EQ(leader.take(now), 1);
  leader.read(Define{id, request});
  leader.read(Run{kWorldSet, 0, {{id, 0}}});
  leader.report(3, Ready{id, {}, 1, kPlain}, now += kPause);
  CHECK_EQ(leader.take(now), 1);
  leader.read(Run{kWorldSet, 0, {{id, 1}}});
  // Now the rank with the id is first, and the other makes the call at another line.
  leader.report(2, Ready{id, {}, 2, kPlain}, now += kPause);
  CHECK_EQ(leader.take(now), 0);
  request.site = "train.py:9";
  leader.report(3, Ready{0, request, 2}, now);
  CHECK_EQ(leader.take(now), 2);
  CHECK(leader.speakers().back() == std::vector<Rank>{3});
  leader.read(Run{kWorldSet, 0, {{id, 2}}});
  leader.report(3, Ready{id, {}, 3, kPlain}, now += kPause);  // waits: both may report it alike
  CHECK_EQ(leader.take(now), 0);
  leader.report(2, Ready{id, {}, 3, kPlain}, now);
  CHECK_EQ(leader.take(now), 1);
  CHECK_EQ(leader.next_tick(), INT64_MAX);
}

// Ranks that had not reported a call when it failed report the next one, perhaps before they read the failure.
TEST(a_report_may_cross_the_failure_of_the_call_before) {
  Leader leader;
  leader.report(2, ReadyMany{{1}}, 0);
  int64_t now = Aggregator::kPatienceNs;
  CHECK_EQ(leader.take(now), 1);
  leader.read(Fail{{kWorldSet, "1"}, {}, {2, 3}});
  leader.read(Run{kWorldSet, 0, {}, {2}});  // of another call
  leader.report(3, ReadyMany{{1}}, now += 20 * kMs);
  CHECK_EQ(leader.take(now), 1);
  leader.read(Run{kWorldSet, 0, {}, {1}});  // now both are at the same call
  leader.report(2, ReadyMany{{1}}, now += 20 * kMs);
  CHECK_EQ(leader.take(now), 0);
  leader.report(3, ReadyMany{{1}}, now += 20 * kMs);
  CHECK_EQ(leader.take(now), 1);
  CHECK_EQ(leader.next_tick(), INT64_MAX);
}

// If a call fails while a report of it waits, the rank that it waits for may have reported the next one.
TEST(a_failure_sends_what_waits_for_the_call) {
  Leader leader;
  leader.report(2, ReadyMany{{1, 2}}, 0);
  CHECK_EQ(leader.take(0), 0);
  leader.read(Fail{{kWorldSet, "1"}, {}});
  CHECK_EQ(leader.take(0), 1);
  leader.report(3, ReadyMany{{1}}, 20 * kMs);
  CHECK_EQ(leader.take(20 * kMs), 1);
  leader.report(3, ReadyMany{{2}}, 40 * kMs);
  CHECK_EQ(leader.take(40 * kMs), 1);
  CHECK(leader.speakers().back().empty());  // all: one report for both ranks
  CHECK_EQ(leader.next_tick(), INT64_MAX);
}

// An unnamed call has a number of its own. Once it has failed, late reports of it wait for nobody.
TEST(a_late_report_of_a_failed_unnamed_call_goes_up_at_once) {
  Leader leader;
  const uint32_t id = 2001;
  leader.read(Define{id, Request{}});
  leader.read(Fail{{kWorldSet, "", 3}, {}, {3}});
  leader.report(3, Ready{id, {}, 3, kPlain}, 0);
  CHECK_EQ(leader.take(0), 1);
  leader.report(2, Ready{id, {}, 4, kPlain}, 20 * kMs);
  CHECK_EQ(leader.take(20 * kMs), 0);
  leader.report(3, Ready{id, {}, 4, kPlain}, 20 * kMs);
  CHECK_EQ(leader.take(20 * kMs), 1);
}

// A call that fails ends only itself, even if its set has calls of which some reports have gone up.
TEST(a_failure_ends_no_other_call) {
  Leader leader;
  leader.report(2, ReadyMany{{1, 2}}, 0);
  const int64_t now = Aggregator::kPatienceNs;
  CHECK_EQ(leader.take(now), 2);
  leader.read(Fail{{kWorldSet, "2"}, {}});
  leader.read(Run{kWorldSet, 0, {}, {3}});
  leader.report(3, ReadyMany{{1}}, 2 * now);
  CHECK_EQ(leader.take(2 * now), 1);
  leader.report(3, ReadyMany{{4}}, 3 * now);
  CHECK_EQ(leader.take(3 * now), 0);
}

// A rank that means something else by a name sends no id. The others' reports by the id then wait for none.
TEST(a_disagreement_shows_at_once) {
  Leader leader;
  leader.report(2, ReadyMany{{1}}, 0);
  CHECK_EQ(leader.take(0), 0);
  leader.report(3, Ready{0, named(1)}, 0);
  CHECK_EQ(leader.take(0), 2);
  leader.report(3, Refuse{{kWorldSet, "2"}, {}}, 20 * kMs);
  CHECK_EQ(leader.take(20 * kMs), 1);
  leader.report(2, ReadyMany{{2}}, 40 * kMs);
  CHECK_EQ(leader.take(40 * kMs), 1);
  CHECK_EQ(leader.next_tick(), INT64_MAX);
}

// Once the id is forgotten, the other ranks report the call without it.
TEST(a_forgotten_id_waits_for_no_rank) {
  Leader leader;
  leader.report(2, ReadyMany{{1, 2}}, 0);
  CHECK_EQ(leader.take(0), 0);
  leader.read(Forget{1});
  CHECK_EQ(leader.take(0), 1);
  leader.report(3, ReadyMany{{2}}, 20 * kMs);
  leader.report(3, Ready{0, named(1)}, 20 * kMs);
  CHECK_EQ(leader.take(20 * kMs), 2);
  CHECK_EQ(leader.next_tick(), INT64_MAX);
  leader.read(Define{1, named(5)});
  leader.report(3, ReadyMany{{1}}, 40 * kMs);
  CHECK_EQ(leader.take(40 * kMs), 0);
}

}  // namespace
}  // namespace farandole
