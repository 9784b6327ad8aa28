// SPDX-License-Identifier: Apache-2.0
// Proves by exhaustion, for two members and where that is feasible for three, that the members of a
// cell agree how each round ended, read each other's data of that round, and never sleep for ever; and that the checker
// would notice.
#include "lib/ipc/cell_protocol.h"

#include <array>
#include <cstdio>

#include "check.h"
#include "lib/ipc/interleavings.h"

namespace farandole {
namespace {

using namespace cell_protocol;

constexpr uint8_t kMost = 3;  // members

struct Shared {
  uint8_t word = 0;  // packed
  uint8_t asleep = 0;
  uint8_t timed_out = 0;
  uint8_t wrong = 0;
  std::array<std::array<uint8_t, kMost>, 2> places{};  // which call's data
  std::array<uint8_t, kMost> says{};                   // what the member calls
  std::array<uint8_t, kMost> reported{};               // calls made through the coordinator
  std::array<uint8_t, kMost> ended{};
};

using Steps = check::Steps<Shared>;
using Interleavings = check::Interleavings<Shared>;
using Program = Interleavings::Program;

// A word of the few rounds that are explored, in the byte that a program observes: 2 bits for those who have arrived, 1,
// 2 for completed rounds, 3 for dissolved ones.
constexpr uint8_t packed(uint32_t word) {
  const uint32_t asleep = (word & kAsleep) != 0 ? 1 : 0;
  const uint32_t completed = (word & kCompletedMask) / kCompleted;
  return static_cast<uint8_t>(arrived(word) | asleep << 2 | completed << 3 |
                              word / kDissolved << 5);
}
constexpr uint32_t unpacked(uint8_t bits) {
  return (bits & 3) + (bits >> 2 & 1) * kAsleep + (bits >> 3 & 3) * kCompleted +
         (bits >> 5) * kDissolved;
}

class Model {
 public:
  Model(Steps& steps, uint8_t member) : steps_(steps), member_(member) {}

  uint32_t load() {
    return unpacked(steps_.step([](Shared& s) { return s.word; }));
  }
  bool replace(uint32_t& expected, uint32_t desired) {
    const uint8_t seen = steps_.step([=](Shared& s) {
      const uint8_t before = s.word;
      if (before == packed(expected)) s.word = packed(desired);
      return before;
    });
    if (seen == packed(expected)) return true;
    expected = unpacked(seen);
    return false;
  }
  void wake() {
    change([](Shared& s) { s.asleep = 0; });
  }
  bool sleep(uint32_t expected, Deadline) {
    const uint8_t own = bit();
    const bool entered = test([=](Shared& s) {
      if (s.word != packed(expected)) return false;
      s.asleep |= own;
      return true;
    });
    if (!entered) return true;
    steps_.await([=](const Shared& s) { return (s.asleep & own) == 0; });
    return !test([=](Shared& s) {
      const bool late = (s.timed_out & own) != 0;
      s.timed_out &= static_cast<uint8_t>(~own);
      return late;
    });
  }

  void time_out() {
    change([own = bit()](Shared& s) {
      if ((s.asleep & own) != 0) s.timed_out |= own;
      s.asleep &= static_cast<uint8_t>(~own);
    });
  }
  void put(uint32_t parity, uint8_t call, uint8_t what) {
    change([=, m = member_](Shared& s) {
      s.places.at(parity).at(m) = call;
      s.says.at(m) = what;
    });
  }
  bool all_say(uint8_t what, uint8_t members) {
    return test([=](Shared& s) {
      for (uint8_t m = 0; m < members; ++m) {
        if (s.says.at(m) != what) return false;
      }
      return true;
    });
  }
  bool anybody_elsewhere(uint8_t call) {
    return test([=, own = member_](Shared& s) {
      for (uint8_t m = 0; m < kMost; ++m) {
        if (m != own && s.reported.at(m) >= call) return true;
      }
      return false;
    });
  }
  void read(uint8_t member, uint32_t parity, uint8_t call) {
    change([=](Shared& s) { s.wrong |= s.places.at(parity).at(member) != call; });
  }
  void report(uint8_t call) {
    change([=, m = member_](Shared& s) { s.reported.at(m) = call; });
  }
  // The coordinator runs the call when all have reported it.
  void await_all(uint8_t call, uint8_t members) {
    steps_.await([=](const Shared& s) {
      for (uint8_t m = 0; m < members; ++m) {
        if (s.reported.at(m) < call) return false;
      }
      return true;
    });
  }
  void end(uint8_t call) {
    change([=, m = member_](Shared& s) { s.ended.at(m) = call; });
  }

 private:
  uint8_t bit() const { return static_cast<uint8_t>(1 << member_); }
  template <class Change>
  void change(Change&& change) {
    steps_.step([&](Shared& s) -> uint32_t { return change(s), 0; });
  }
  template <class Test>
  bool test(Test&& test) {
    return steps_.step([&](Shared& s) -> uint32_t { return test(s); }) != 0;
  }

  Steps& steps_;
  const uint8_t member_;
};

// A member may differ in these ways from production code, and from its peers.
struct Ways {
  bool one_place = false;    // for its data, whatever the round
  bool looks_first = false;  // at who is elsewhere, before it arrives
  bool believes = false;     // does not compare calls
  bool is_quiet = false;     // does not disturb those who wait
  uint8_t differs = 0;       // the number of a call for which it makes a different one
  uint8_t elsewhere = 0;     // the number of a call for which it does not come to the cell
};

// Mirrors Cell::meet() and RankCalls::call().
Program member(uint8_t number, uint8_t members, uint8_t calls, const Ways& ways = {}) {
  const auto body = [=](Steps& steps) {
    Model model(steps, number);
    const uint8_t call = steps.memory();
    End end = End::kDissolved;
    uint32_t place = 0;
    if (call != ways.elsewhere) {
      place = ways.one_place ? 0 : parity(model.load());
      const auto what = static_cast<uint8_t>(call == ways.differs ? 100 : call);
      model.put(place, call, what);
      const bool early = ways.looks_first && model.anybody_elsewhere(call);
      uint32_t round = 0;
      end = arrive(model, members, round,
                   [&] { return ways.believes || model.all_say(what, members); });
      if (end == End::kUnderWay) {
        const bool vain = ways.looks_first ? early : model.anybody_elsewhere(call);
        end = vain ? give_up(model, round) : sleep_until_end(model, round, Deadline::never());
      }
    }
    if (end == End::kCompleted) {
      for (uint8_t m = 0; m < members; ++m) model.read(m, place, call);
    } else {
      model.report(call);
      if (!ways.is_quiet) disturb(model);
      model.await_all(call, members);
    }
    model.end(call);
    if (call < calls) steps.restart(static_cast<uint8_t>(call + 1));
  };
  return {body, 1};
}

// The patience of a sleeping member ends once, at any moment.
Program timer(uint8_t number) {
  return {[=](Steps& steps) { Model(steps, number).time_out(); }};
}

bool always_good(const char* name, uint8_t members, uint8_t calls, std::vector<Program> programs) {
  const Interleavings explored(Shared{}, std::move(programs), [=](const Shared& s) {
    for (uint8_t m = 0; m < members; ++m) {
      if (s.ended.at(m) != calls) return false;
    }
    return s.wrong == 0;
  });
  std::fprintf(stderr, "     %s: %zu states, %zu ends\n", name, explored.states(), explored.ends());
  CHECK(explored.ends() > 0);
  return !explored.bad();
}

}  // namespace

TEST(members_meet_call_after_call) {
  CHECK(always_good("two members", 2, 3, {member(0, 2, 3), member(1, 2, 3)}));
}

TEST(patience_ends_at_any_moment) {
  CHECK(always_good("one timer", 2, 3, {member(0, 2, 3), member(1, 2, 3), timer(0)}));
  CHECK(always_good("two timers", 2, 2, {member(0, 2, 2), member(1, 2, 2), timer(0), timer(1)}));
}

TEST(a_member_that_goes_elsewhere_is_noticed) {
  CHECK(always_good("two members", 2, 3, {member(0, 2, 3), member(1, 2, 3, {.elsewhere = 2})}));
  CHECK(always_good("three members", 3, 1,
                    {member(0, 3, 1), member(1, 3, 1), member(2, 3, 1, {.elsewhere = 1})}));
}

TEST(a_different_call_dissolves_the_round) {
  CHECK(always_good("two members", 2, 3,
                    {member(0, 2, 3), member(1, 2, 3, {.differs = 2}), timer(0)}));
}

TEST(the_checker_catches_what_differs_from_the_protocol) {
  CHECK(!always_good("a place that is written too early", 2, 2,
                     {member(0, 2, 2, {.one_place = true}), member(1, 2, 2, {.one_place = true})}));
  CHECK(!always_good("a member that looks before it arrives", 2, 1,
                     {member(0, 2, 1, {.looks_first = true}),
                      member(1, 2, 1, {.is_quiet = true, .elsewhere = 1})}));
  CHECK(!always_good("one who goes elsewhere quietly", 2, 1,
                     {member(0, 2, 1), member(1, 2, 1, {.is_quiet = true, .elsewhere = 1})}));
  // Member 1 makes call 1 elsewhere, quietly, then meets member 0, which is still at it.
  CHECK(!always_good(
      "a last member that does not compare", 2, 2,
      {member(0, 2, 2, {.believes = true}),
       member(1, 2, 2, {.believes = true, .is_quiet = true, .elsewhere = 1}), timer(0)}));
}

}  // namespace farandole
