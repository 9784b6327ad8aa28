// SPDX-License-Identifier: Apache-2.0
#include "lib/os/spin.h"

#include "check.h"

using namespace farandole;
using Who = Spin::Who;

namespace {

// True if a thread polls at all, with `cores` for two ranks.
bool polls(Who who, int64_t setting_us, int cores, bool moving) {
  int looks = 0;
  Spin spin(who, setting_us, cores, 2);
  const bool found = spin(moving, [&] { return ++looks > 0; });
  CHECK_EQ(found, looks > 0);
  return found;
}

}  // namespace

TEST(a_caller_polls_however_many_ranks_share_its_core) {
  for (bool moving : {false, true}) {
    CHECK(polls(Who::kCaller, -1, 1, moving));
    CHECK(polls(Who::kCaller, -1, 2, moving));
    CHECK(!polls(Who::kCaller, 0, 1, moving));
  }
}

TEST(the_background_thread_polls_where_every_rank_has_two_cores_or_a_bucket_moves) {
  CHECK(!polls(Who::kBackground, -1, 3, false));
  CHECK(polls(Who::kBackground, -1, 4, false));
  CHECK(!polls(Who::kBackground, -1, 1, true));
  CHECK(polls(Who::kBackground, -1, 2, true));
}

TEST(the_setting_goes_before_the_number_of_cores) {
  for (Who who : {Who::kCaller, Who::kBackground}) {
    CHECK(!polls(who, 0, 64, false));
    CHECK(polls(who, 10, 1, false));
    CHECK(polls(who, 10, 1, true));
  }
}

TEST(the_background_thread_polls_less_often_while_it_finds_nothing) {
  Spin spin(Who::kBackground, 1, 4, 2);
  int rounds = 0;  // in which it looked
  for (int i = 0; i < 1000; ++i) {
    bool looked = false;
    CHECK(!spin(false, [&] {
      looked = true;
      return false;
    }));
    rounds += looked;
  }
  CHECK(rounds > 3);
  CHECK(rounds < 40);
}
