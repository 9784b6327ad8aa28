// SPDX-License-Identifier: Apache-2.0
// Bad calls: an error on every rank, and then life goes on.
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "random.h"
#include "runtime/runtime_ranks.h"

using namespace farandole;
using namespace farandole::check;

// One wrong argument each, and what the error says.
struct Wrong {
  void (*spoil)(Ask& ask);
  const char* says;
  ErrorCode code = ErrorCode::kInvalidArgument;
};

constexpr Wrong kWrong[] = {
    {[](Ask& a) { a.set = 7; }, "there is no process set 7"},
    {[](Ask& a) { a.op = 99; }, "unknown operation 99"},
    {[](Ask& a) { a.reduce_op = -1; }, "unknown reduce op -1"},
    {[](Ask& a) { a.dtype = 99; }, "unknown dtype 99"},
    {[](Ask& a) { a.dtype = FARANDOLE_BOOL; }, "Sum of bool is not defined", ErrorCode::kWrongType},
    {[](Ask& a) { a.device = -2; }, "no such device"},
    {[](Ask& a) { a.name.assign(5000, 'x'); }, "longer than 4096 bytes"},
    {[](Ask& a) { a.shape = {-1}; }, "negative length in shape"},
    {[](Ask& a) { a.shape = {int64_t{1} << 40, int64_t{1} << 40}; }, "is too large"},
    {[](Ask& a) { a.shape.assign(65, 1); }, "more than 64 dimensions"},
    {[](Ask& a) { a.op = FARANDOLE_ALLGATHER, a.shape = {}; }, "a scalar has no first dimension"},
    {[](Ask& a) { a.op = FARANDOLE_BROADCAST, a.root = 9; }, "root rank 9 is not among rank"},
    {[](Ask& a) { a.op = FARANDOLE_ALLTOALL, a.splits = {1, 1, 1}; }, "splits has 3 entries"},
    {[](Ask& a) { a.op = FARANDOLE_ALLTOALL, a.shape = {5}, a.splits = {6, 0}; }, "splits"},
    // A process set may have any number of ranks; these are too many for the world only.
    {[](Ask& a) { a.op = FARANDOLE_ADD_SET, a.shape.assign(100, 5); }, "process set"},
    {[](Ask& a) { a.op = FARANDOLE_REMOVE_SET, a.shape = {}, a.root = 3; }, "process set 3"},
    {[](Ask& a) { a.op = FARANDOLE_REMOVE_SET, a.set = 1; }, "there is no process set 1"},
    {[](Ask& a) { a.op = FARANDOLE_BARRIER, a.shape = {-5}; }, "negative length in shape"},
    {[](Ask& a) { a.op = FARANDOLE_ADD_SET, a.shape = {0}, a.by_members = true; }, "needs a name"},
    {[](Ask& a) { a.op = FARANDOLE_ADD_SET, a.shape = {7}, a.name = "g", a.by_members = true; },
     "is not among"},
};

TEST(a_wrong_argument_is_refused_on_all_ranks) {
  run_jobs({1, 2}, [](TestRank& self) {
    for (const Wrong& wrong : kWrong) {
      Floats data(4);
      Ask ask = allreduce(data);
      wrong.spoil(ask);
      const std::string text = self.fails(ask, wrong.code);
      if (!contains(text, wrong.says)) fail("'" + text + "' does not say '" + wrong.says + "'");
    }
    self.check_usable();
  });
}

// Fields that an Ask always fills in well.
TEST(a_wrong_field_is_refused) {
  const std::string long_site(5000, 'x');
  run_jobs({2}, [&](TestRank& self) {
    Floats data = values_of(self.rank, 3);
    const auto refused = [&](const farandole_request& wrong) {
      CHECK_THROWS(TestRank::submit(*self.runtime(), {&wrong, 1}), ErrorCode::kInvalidArgument);
    };
    Ask all = allreduce(data);
    all.op = FARANDOLE_ALLTOALL;
    farandole_request request = all.request();
    request.n_splits = -1;
    refused(request);
    const Ask sum = allreduce(data);
    request = sum.request();
    request.site = long_site.c_str();
    refused(request);
    Ask message{FARANDOLE_SEND, {3}, data.data(), nullptr, ""};
    if (self.rank == 1) message = {FARANDOLE_RECEIVE, {3}, nullptr, data.data(), ""};
    message.root = 1 - self.rank;
    const CheckedCall kept = self.prepare(message);
    CHECK_THROWS(self.submit(kept, nullptr, nullptr), ErrorCode::kInvalidArgument);
    self.check_usable();
  });
}

// A group is of one set. Where one rank only is wrong, its peers hear of it.
TEST(what_does_not_go_together_is_refused) {
  run_jobs({3}, [](TestRank& self) {
    const SetId pair = add_set(self, {0, 1});
    Floats one = values_of(self.rank, 700), two = values_of(self.rank, 700);
    Ask here = allreduce(one), there = allreduce(two);
    there.set = pair;
    const Ask add{FARANDOLE_ADD_SET, {0, 2}, nullptr, nullptr, ""};
    const auto refused = [&](const Ask& a, const Ask& b) {
      CHECK_THROWS(self.submit(std::vector<Ask>{a, b}), ErrorCode::kInvalidArgument);
    };
    refused(here, there);
    if (self.rank < 2) refused(there, here);
    refused(add, add);
    self.check_usable();
    if (self.rank == 0) {
      CHECK(contains(
          CHECK_THROWS(self.submit(std::vector<Ask>{here, there}), ErrorCode::kInvalidArgument),
          "use 0 and 1; make a call for each set"));
    } else {
      CHECK(contains(self.fails(here, ErrorCode::kInvalidArgument), "rank 0 refused"));
    }
    self.check_usable();
    if (self.rank == 2) return;
    self.run(there);
    CHECK(two == sum_over(2, two.size()));
  });
}

// Small ones travel in the report, large ones in a bucket; any tensor of them may be missing here or everywhere.
TEST(each_tensor_of_a_group_has_its_own_result) {
  run_jobs({1, 2, 3}, [](TestRank& self) {
    const auto n = static_cast<size_t>(self.size);
    for (size_t length : {size_t{2}, size_t{4000}}) {
      Floats sum = values_of(self.rank, length), none(length), rows = values_of(self.rank, length);
      Floats lonely = values_of(0, length), all(n * length);
      Ask gather = allreduce(rows);
      gather.op = FARANDOLE_ALLGATHER;
      gather.output = all.data();
      Ask absent = allreduce(none), one_s = allreduce(lonely);
      absent.input = nullptr;
      if (self.rank > 0) one_s.input = nullptr;
      for (const bool with_absent : {false, true}) {
        sum = values_of(self.rank, length);
        std::vector<Ask> group{allreduce(sum, "group"), gather, one_s};
        if (with_absent) group.insert(group.begin() + 1, absent);
        const std::vector<Handle> handles = self.submit(group);
        CHECK(!self.wait(handles));
        for (size_t i = 0; i < handles.size(); ++i) {
          self.runtime()->handles().look(handles[i], [&](const Outcome& outcome) {
            CHECK_EQ(outcome.absent, with_absent && i == 1);
            CHECK_EQ(outcome.shape[0], group[i].op == FARANDOLE_ALLGATHER ? n * length : length);
          });
          self.runtime()->handles().release(handles[i]);
        }
        CHECK(sum == sum_over(self.size, length) && lonely == values_of(0, length));
        for (size_t r = 0; r < n; ++r) {
          const auto at = all.begin() + static_cast<ptrdiff_t>(r * length);
          CHECK(std::equal(at, at + static_cast<ptrdiff_t>(length),
                           values_of(static_cast<int>(r), length).begin()));
        }
      }
    }
  });
}

namespace {

// So that the limit of descriptors on their way applies, which root may exceed.
void become_nobody() {
  constexpr uid_t kNobody = 65534;
  if (geteuid() == 0) CHECK_EQ(setresuid(kNobody, kNobody, kNobody), 0);
}

// While it lives, this process can send one descriptor to a peer, but no second one before the first is received.
class OneDescriptorOnItsWay {
 public:
  OneDescriptorOnItsWay() {
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before_), 0);
    rlimit limit = before_;
    limit.rlim_cur = kMost;
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends_), 0);
    UnixSocket out{Fd(dup(ends_[0]))};
    const std::vector<int> copies(UnixSocket::kMaxFds, ends_[0]);
    const std::byte something{1};
    for (size_t sent = 0; sent < kMost; sent += copies.size()) {
      out.send({&something, 1}, copies, patience());
    }
  }
  ~OneDescriptorOnItsWay() {
    for (int end : ends_) close(end);
    setrlimit(RLIMIT_NOFILE, &before_);
  }
  OneDescriptorOnItsWay(const OneDescriptorOnItsWay&) = delete;
  OneDescriptorOnItsWay& operator=(const OneDescriptorOnItsWay&) = delete;

 private:
  static constexpr size_t kMost = 4 * UnixSocket::kMaxFds;
  rlimit before_{};
  int ends_[2]{};
};

Ask form_set(const std::string& name) {
  Ask form{FARANDOLE_ADD_SET, {0, 1, 2}, nullptr, nullptr, name};
  form.by_members = true;
  return form;
}

Ask wrong_dtype(Floats& data, std::string name) {
  Ask ask = allreduce(data, std::move(name));
  ask.dtype = FARANDOLE_BOOL;  // no sum of those
  return ask;
}

}  // namespace

// The refusing rank may be first or last, and tries again before its peers have heard of it.
TEST(a_refused_call_may_be_tried_again_at_once) {
  run_jobs({2, 3, 4}, [](TestRank& self) {
    for (int round = 0; round < 4; ++round) {
      const bool refuses_first = round % 2 == 0;
      const bool bad = self.rank == 1;
      Floats data = values_of(self.rank, 300);
      if (!bad && refuses_first) self.bootstrap.await(round, 1);
      if (bad && !refuses_first) self.bootstrap.await(round, static_cast<uint32_t>(self.size) - 1);
      if (bad) {
        CHECK_THROWS(self.submit(wrong_dtype(data, "again")), ErrorCode::kWrongType);
        Handle retry = self.submit(allreduce(data, "again"));
        if (refuses_first) {  // the retry can't be done yet
          CHECK_THROWS(self.submit(allreduce(data, "again")), ErrorCode::kInvalidArgument);
          self.bootstrap.tell(round);
        }
        self.finish(retry);
      } else {
        Handle first = self.submit(allreduce(data, "again"));
        if (!refuses_first) self.bootstrap.tell(round);
        const Failure failure = self.wait({first});
        CHECK_EQ(failure.code, ErrorCode::kWrongType);
        CHECK(contains(failure.text, "rank 1"));
        self.run(allreduce(data, "again"));
      }
      CHECK(data == sum_over(self.size, data.size()));
    }
  });
}

// Rank 1 has got it, rank 2 has not. The memory of the next set is the next set's.
TEST(a_set_whose_memory_reaches_some_members_only_spoils_no_other) {
  LocalBootstrap bootstrap(3);
  run_in_forks(3, [&](int rank) {
    become_nobody();
    Config config = test_config();
    config.stall_abort = 5;
    TestRank self(bootstrap, rank, config);
    self.start();
    {
      std::unique_ptr<OneDescriptorOnItsWay> limit;
      if (rank == 0) limit = std::make_unique<OneDescriptorOnItsWay>();
      self.fails(form_set("one"), ErrorCode::kLibrary);
      bootstrap.barrier();
    }
    Floats data = values_of(rank, 40'000);
    Ask sum = allreduce(data);
    sum.set = self.set_of(self.submit(form_set("two")));
    self.run(sum);
    CHECK(data == sum_over(3, data.size()));
    self.check_usable();
    self.leave();
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
          const Handle handle =
              kept ? self.submit(self.prepare(ask), ask.input, ask.output) : self.submit(ask);
          CHECK(!bad);
          failure = self.wait({handle});
          self.runtime()->handles().release(handle);
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

TEST(a_joined_rank_submits_nothing) {
  run_jobs({2, 3}, [](TestRank& self) {
    Floats data = values_of(self.rank, 3);
    const CheckedCall kept = self.prepare(allreduce(data, "kept"));
    if (self.rank > 0) self.bootstrap.await(0, 1);
    Handle join = self.submit({FARANDOLE_JOIN, {}, nullptr, nullptr, ""});
    if (self.rank == 0) {
      CHECK_THROWS(self.submit(allreduce(data)), ErrorCode::kInvalidArgument);
      CHECK_THROWS(self.submit(kept, data.data(), data.data()), ErrorCode::kInvalidArgument);
      CHECK_THROWS(self.submit({FARANDOLE_JOIN, {}, nullptr, nullptr, ""}),
                   ErrorCode::kInvalidArgument);
      self.bootstrap.tell(0);
    }
    self.finish(join);
    CHECK_THROWS(self.submit(std::vector<Ask>(2, {FARANDOLE_JOIN, {}, nullptr, nullptr, ""})),
                 ErrorCode::kInvalidArgument);
    self.check_usable();
  });
}

// Reports of it come after the set is gone for the coordinator.
TEST(a_call_after_its_set_was_removed_fails) {
  run_jobs({3}, [](TestRank& self) {
    for (int round = 0; round < 10; ++round) {
      Ask remove{FARANDOLE_REMOVE_SET, {}, nullptr, nullptr, ""};
      remove.root = add_set(self, {0, 1});
      // Rank 2 comes first: until all ranks have asked for the removal, calls of the set are in time.
      Floats go(1);
      Handle removed = 0;
      if (self.rank == 2) removed = self.submit(remove);
      self.run(allreduce(go, "go"));
      if (self.rank != 2) removed = self.submit(remove);
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

// The others have asked for the removal already, so the other member does not come into the cell.
TEST(a_call_fails_in_a_cell_when_its_set_is_removed) {
  run_jobs({3}, [](TestRank& self) {
    Ask remove{FARANDOLE_REMOVE_SET, {}, nullptr, nullptr, ""};
    remove.root = add_set(self, {0, 1});
    Floats data(3);
    Ask met = allreduce(data, "met");
    met.set = remove.root;
    const CheckedCall call = self.rank == 2 ? CheckedCall{} : self.prepare(met);
    for (int i = 0; i < 3 && self.rank < 2; ++i) {
      data = values_of(self.rank, data.size());
      CHECK(!self.call(call, data));
      CHECK(data == sum_over(2, data.size()));
    }
    std::thread thread;
    if (self.rank == 0) {
      self.bootstrap.await(0, 2);
      const uint64_t before = self.tally().submitted;
      thread = std::thread([&] {
        const Failure failure = self.call(call, data);
        CHECK_EQ(failure.code, ErrorCode::kInvalidArgument);
        CHECK(contains(failure.text, "was removed"));
      });
      while (self.tally().submitted == before) std::this_thread::yield();
    }
    const Handle removed = self.submit(remove);
    if (self.rank > 0) self.bootstrap.tell(0);
    self.finish(removed);
    if (thread.joinable()) thread.join();
    self.check_usable();
  });
}
