// SPDX-License-Identifier: Apache-2.0
// The lanes of a job that ends.
#include "runtime/lanes.h"

#include "check.h"

using namespace farandole;
using namespace farandole::check;

namespace {

// Its exchange with other hosts can't be given up.
class Endless final : public Backend {
 public:
  explicit Endless(bool throws) : throws_(throws) {}
  void begin(std::span<const Part>) override {}
  Progress step() override { return Progress::kWaiting; }
  bool ready() const override { return false; }
  void abort() override {
    if (throws_) throw Error(ErrorCode::kLibrary, "no thread to abort with");
  }

 private:
  const bool throws_;
};

}  // namespace

TEST(a_lane_that_cannot_be_given_up_keeps_nobody_waiting) {
  const Segment control = Segment::create("control", ShmLayout::bytes_needed(1), true);
  const Segment flight = Segment::create("flight", FlightMemory::bytes_needed(1, 1), true);
  MemberChannel channel(ShmLayout(control.data(), 1), 0);
  FlightMemory memory(flight.data(), 1, 1);
  memory.prepare();
  Recorder recorder(memory, 0, {});
  EventCount driver;
  RankCalls calls({0, channel, false, true, kTinyBytes, recorder, driver});
  Lanes lanes(calls);
  std::vector<Handle> handles;
  for (SetId set : {0, 1}) {
    calls.on(OpenSet{set, {0}, {}});
    lanes.open(set, nullptr, std::make_unique<Endless>(set == 0));
    BegunRun run{{set, 1, false}};
    Ending ending;
    ending.submission.handle = calls.handles.create(kNoLabel, false);
    ending.submission.recorded.set = set;
    handles.push_back(ending.submission.handle);
    run.endings.push_back(std::move(ending));
    lanes.push(set, std::move(run));
  }
  lanes.step();
  lanes.abort({ErrorCode::kPeer, "rank 1 died"});
  for (Handle handle : handles) {
    Failure failure;
    size_t ready = 0;
    CHECK(calls.handles.finished(std::span(&handle, 1), ready, failure));
    CHECK_EQ(failure.code, ErrorCode::kPeer);
  }
}
