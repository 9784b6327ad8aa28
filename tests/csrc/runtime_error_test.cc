// SPDX-License-Identifier: Apache-2.0
// Bad calls: an error on every rank, and then life goes on.
#include "random.h"
#include "runtime_ranks.h"

using namespace farandole;
using namespace farandole::check;

namespace {

Ask wrong_dtype(Floats& data, std::string name) {
  Ask ask = allreduce(data, std::move(name));
  ask.dtype = FARANDOLE_BOOL;  // no sum of those
  return ask;
}

// Until no rank comes too late for the others' patience.
void insist(TestRank& self, const std::string& name) {
  Floats data;
  for (Failure failure{ErrorCode::kStall, ""}; failure;) {
    CHECK_EQ(failure.code, ErrorCode::kStall);
    data = values_of(self.rank, 2000);
    Handle handle = self.submit(allreduce(data, name));
    failure = self.wait({handle});
    self.runtime()->handles().release(handle);
  }
  CHECK(data == sum_over(self.size, data.size()));
}

}  // namespace

TEST(a_mismatch_fails_on_all_ranks) {
  run_jobs({2, 3, 4}, [](TestRank& self) {
    for (const char* name : {"tensor", "tensor", ""}) {
      Floats data = values_of(self.rank, self.rank == 1 ? 4 : 5);
      std::string text = self.fails(allreduce(data, name), ErrorCode::kMismatch);
      CHECK(contains(text, "(4) on rank 1") || contains(text, "(4,) on rank 1"));
      self.check_usable(name);
    }
  });
}

// The refusing rank may be first or last, and tries again before its peers have heard of it.
TEST(a_refused_call_may_be_tried_again_at_once) {
  run_jobs({2, 3, 4}, [](TestRank& self) {
    for (int round = 0; round < 4; ++round) {
      const bool refuses_first = round % 2 == 0;
      const bool bad = self.rank == 1;
      Floats data = values_of(self.rank, 300);
      if (!bad && refuses_first) self.lobby.await(round, 1);
      if (bad && !refuses_first) self.lobby.await(round, static_cast<uint32_t>(self.size) - 1);
      if (bad) {
        CHECK_THROWS(self.submit(wrong_dtype(data, "again")), ErrorCode::kWrongType);
        Handle retry = self.submit(allreduce(data, "again"));
        if (refuses_first) {  // the retry can't be done yet
          CHECK_THROWS(self.submit(allreduce(data, "again")), ErrorCode::kInvalidArgument);
          self.lobby.tell(round);
        }
        self.finish(retry);
      } else {
        Handle first = self.submit(allreduce(data, "again"));
        if (!refuses_first) self.lobby.tell(round);
        const Failure failure = self.wait({first});
        CHECK_EQ(failure.code, ErrorCode::kWrongType);
        CHECK(contains(failure.text, "rank 1"));
        self.run(allreduce(data, "again"));
      }
      CHECK(data == sum_over(self.size, data.size()));
    }
  });
}

// Every attempt of one rank meets an attempt of the others.
TEST(refusals_in_a_row_fail_as_many_calls) {
  run_jobs({2, 3}, [](TestRank& self) {
    Floats data = values_of(self.rank, 3);
    if (self.rank == 0) {
      for (int i = 0; i < 3; ++i) {
        CHECK_THROWS(self.submit(wrong_dtype(data, "row")), ErrorCode::kWrongType);
      }
      self.lobby.tell(0);
    } else {
      self.lobby.await(0, 1);
      for (int i = 0; i < 3; ++i) self.fails(allreduce(data, "row"), ErrorCode::kWrongType);
    }
    self.check_usable("row");
  });
}

TEST(one_name_twice_in_a_group_is_refused_once) {
  run_jobs({1, 2, 3}, [](TestRank& self) {
    for (int round = 0; round < 2; ++round) {
      Floats a = values_of(self.rank, 3);
      Floats b = values_of(self.rank, 3);
      if (self.rank == 0) {
        CHECK_THROWS(self.submit(std::vector<Ask>{allreduce(a, "twin"), allreduce(b, "twin")}),
                     ErrorCode::kInvalidArgument);
      } else {
        self.fails(allreduce(a, "twin"), ErrorCode::kInvalidArgument);
      }
      self.check_usable("twin");
    }
  });
}

TEST(a_name_in_flight_is_taken) {
  run_jobs({2, 3}, [](TestRank& self) {
    Floats data = values_of(self.rank, 300);
    Floats other = values_of(self.rank, 300);
    if (self.rank == 0) {
      Handle handle = self.submit(allreduce(data, "taken"));
      CHECK_THROWS(self.submit(allreduce(other, "taken")), ErrorCode::kInvalidArgument);
      self.lobby.tell(0);
      self.finish(handle);
    } else {
      self.lobby.await(0, 1);
      self.run(allreduce(data, "taken"));
    }
    CHECK(data == sum_over(self.size, data.size()));
    self.check_usable("taken");
  });
}

TEST(refuse_tells_the_peers) {
  run_jobs({2, 3}, [](TestRank& self) {
    for (const char* name : {"unfit", ""}) {
      Floats data = values_of(self.rank, 3);
      Ask ask = allreduce(data, name);
      if (self.rank == 0) {
        self.runtime()->refuse(ask.request(), {ErrorCode::kWrongType, "it is no array"});
      } else {
        CHECK(contains(self.fails(ask, ErrorCode::kWrongType), "it is no array"));
      }
      self.check_usable(name);
    }
  });
}

TEST(arguments_are_checked_before_anything_travels) {
  run_jobs({1, 2}, [](TestRank& self) {
    Floats data(4);
    auto refused = [&](Ask ask) { CHECK_THROWS(self.submit(ask), ErrorCode::kInvalidArgument); };
    Ask ask = allreduce(data);
    ask.set = 7, refused(ask);
    ask = allreduce(data), ask.op = 99, refused(ask);
    ask = allreduce(data), ask.reduce_op = -1, refused(ask);
    ask = allreduce(data), ask.shape = {-1}, refused(ask);
    ask = {FARANDOLE_ALLGATHER, {}, data.data(), nullptr, ""}, refused(ask);
    ask = {FARANDOLE_BROADCAST, {4}, data.data(), data.data(), ""}, ask.root = 9, refused(ask);
    // A process set may have any number of ranks; these are too many for the world only.
    ask = {FARANDOLE_ADD_SET, std::vector<int64_t>(100), nullptr, nullptr, ""};
    for (size_t i = 0; i < ask.shape.size(); ++i) ask.shape[i] = static_cast<int64_t>(i);
    CHECK(contains(self.fails(ask, ErrorCode::kInvalidArgument), "process set"));
    ask = {FARANDOLE_REMOVE_SET, {}, nullptr, nullptr, ""}, ask.root = 3;
    self.fails(ask, ErrorCode::kInvalidArgument);
    self.check_usable();
  });
}

// By both entries; the peers, whose buffers are apart, hear of it.
TEST(buffers_that_overlap_in_part_are_refused) {
  run_jobs({2, 3}, [](TestRank& self) {
    const auto refused = [&self](Ask ask, int64_t input_at, int64_t output_at, bool wrong = true) {
      Floats room(200), apart(200);
      ask.input = room.data() + input_at;
      const bool bad = self.rank == 1 && wrong;
      ask.output = self.rank == 1 ? room.data() + output_at : apart.data();
      ask.name = "overlap";
      for (bool kept : {false, true}) {
        Failure failure;
        try {
          const farandole_request request = ask.request();
          Runtime& runtime = *self.runtime();
          const Handle handle = kept ? runtime.submit(runtime.keep(request), ask.input, ask.output)
                                     : self.submit(ask);
          CHECK(!bad);
          failure = self.wait({handle});
          runtime.handles().release(handle);
        } catch (const Error& error) {
          failure = {error.code(), error.what()};
        }
        CHECK_EQ(failure.code, wrong ? ErrorCode::kInvalidArgument : ErrorCode::kOk);
        CHECK_EQ(contains(failure.text, "overlap"), wrong);
      }
    };
    const auto n = static_cast<int64_t>(self.size);
    const Ask sum{FARANDOLE_ALLREDUCE, {24}, nullptr, nullptr, ""};
    refused(sum, 0, 1);
    refused(sum, 23, 0);
    refused(sum, 0, 24, false);
    refused(sum, 5, 5, false);
    refused({FARANDOLE_BROADCAST, {4, 6}, nullptr, nullptr, ""}, 2, 0);
    refused({FARANDOLE_REDUCESCATTER, {24, 1}, nullptr, nullptr, ""}, 0, 3);
    refused({FARANDOLE_REDUCESCATTER, {24, 1}, nullptr, nullptr, ""}, 0, 0, false);
    refused({FARANDOLE_REDUCESCATTER, {24, 1}, nullptr, nullptr, ""}, 24 / n, 0, false);
    refused({FARANDOLE_ALLGATHER, {24}, nullptr, nullptr, ""}, 0, 3);
    refused({FARANDOLE_ALLGATHER, {24}, nullptr, nullptr, ""}, 24, 0, false);
    refused({FARANDOLE_ALLTOALL, {24}, nullptr, nullptr, ""}, 0, 0);
    refused({FARANDOLE_ALLTOALL, {24}, nullptr, nullptr, ""}, 0, 24, false);
    Ask deal{FARANDOLE_SCATTER, {24}, nullptr, nullptr, ""};
    refused(deal, 0, 0, false);  // rank 1 is not the root: nobody reads its input
    deal.root = 1;
    refused(deal, 0, 0);
    refused(deal, 0, 24, false);
    self.check_usable();
  });
}

TEST(whoever_has_joined_submits_nothing) {
  run_jobs({2, 3}, [](TestRank& self) {
    Floats data = values_of(self.rank, 3);
    const Asked kept = self.runtime()->keep(allreduce(data, "kept").request());
    if (self.rank > 0) self.lobby.await(0, 1);
    Handle join = self.submit({FARANDOLE_JOIN, {}, nullptr, nullptr, ""});
    if (self.rank == 0) {
      CHECK_THROWS(self.submit(allreduce(data)), ErrorCode::kInvalidArgument);
      CHECK_THROWS(self.runtime()->submit(kept, data.data(), data.data()),
                   ErrorCode::kInvalidArgument);
      CHECK_THROWS(self.submit({FARANDOLE_JOIN, {}, nullptr, nullptr, ""}),
                   ErrorCode::kInvalidArgument);
      self.lobby.tell(0);
    }
    self.finish(join);
    CHECK_THROWS(self.submit(std::vector<Ask>(2, {FARANDOLE_JOIN, {}, nullptr, nullptr, ""})),
                 ErrorCode::kInvalidArgument);
    self.check_usable();
  });
}

// Reports of it come after the set is gone for the coordinator.
TEST(a_call_that_comes_too_late_for_its_set) {
  run_jobs({3}, [](TestRank& self) {
    for (int round = 0; round < 10; ++round) {
      const Handle added = self.submit({FARANDOLE_ADD_SET, {0, 1}, nullptr, nullptr, ""});
      CHECK(!self.wait({added}));
      Ask remove{FARANDOLE_REMOVE_SET, {}, nullptr, nullptr, ""};
      self.runtime()->handles().look(
          added, [&](const Outcome& outcome) { remove.root = static_cast<int>(outcome.value); });
      const Handle removed = self.submit(remove);
      // While these are submitted, this rank reads no log.
      Floats data(3000);
      Ask late = allreduce(data);
      late.set = remove.root;
      std::vector<Handle> handles;
      try {
        handles = self.submit(std::vector<Ask>(300, late));
      } catch (const Error& error) {  // always on rank 2, which is not in the set
        CHECK_EQ(error.code(), ErrorCode::kInvalidArgument);
      }
      for (Handle handle : handles) {
        CHECK_EQ(self.wait({handle}).code, ErrorCode::kInvalidArgument);
        self.runtime()->handles().release(handle);
      }
      self.finish(removed);
    }
    self.check_usable();
  });
}

// A call that some ranks gave up is not the one that a late rank reports then.
TEST(a_stall_ends_in_an_error) {
  run_jobs(
      {2, 3},
      [](TestRank& self) {
        for (const char* name : {"stalled", "stalled", ""}) {
          const bool named = *name != 0;
          Floats data = values_of(self.rank, 3000);
          if (self.rank == 0) {
            CHECK(contains(self.fails(allreduce(data, name), ErrorCode::kStall), "missing"));
          }
          self.lobby.barrier();
          // An unnamed call has its place in the order, even if it comes late.
          if (self.rank != 0 && !named) self.fails(allreduce(data, name), ErrorCode::kStall);
          if (named) insist(self, name);
          self.lobby.barrier();
        }
      },
      [](Config& config) { config.stall_abort = 0.05; });
}

// The late rank's report and the news that the others gave up cross each other, now and then.
TEST(a_report_that_crosses_a_stall) {
  constexpr int kNever = 31;
  run_jobs(
      {2, 3},
      [](TestRank& self) {
        Random random(static_cast<uint64_t>(self.rank + 1));
        for (int round = 0; round < 30; ++round) {
          const auto late =
              std::chrono::microseconds(self.rank == 0 ? 0 : 4500 + random.below(1500));
          self.lobby.await(kNever, 1, Deadline::in(late));
          insist(self, "crossing");
        }
      },
      [](Config& config) { config.stall_abort = 0.005; });
}
