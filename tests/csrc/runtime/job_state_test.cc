// SPDX-License-Identifier: Apache-2.0
// The end of a job on one rank.
#include "runtime/calls/job_state.h"

#include <thread>

#include "check.h"

using namespace farandole;
using namespace farandole::check;

TEST(a_failure_wakes_the_driver) {
  EventCount count;
  Wakeup driver(count);
  JobState job(driver);
  std::thread background([&] {
    while (!job.failing()) {
      driver.wait(
          Sleeper::kBackground, driver.prepare(), [&] { return job.failing(); }, Deadline::never());
    }
  });
  std::thread finder([&] { job.fail({ErrorCode::kInternal, "a result in a cell"}); });
  finder.join();
  background.join();
  CHECK_EQ(rescued_wakeups(), uint64_t{0});
}

// The cause is not lost: nobody else hears of it.
TEST(once_all_have_left_only_a_death_is_a_normal_end) {
  EventCount driver;
  JobState job(driver);
  const Failure death{ErrorCode::kPeer, "rank 1 died"}, fault{ErrorCode::kLibrary, "the GPU fails"};
  CHECK_EQ(job.verdict(death).text, death.text);
  job.stop();
  CHECK_EQ(job.verdict(death).code, ErrorCode::kShutdown);
  CHECK_EQ(job.verdict(fault).text, fault.text);
}
