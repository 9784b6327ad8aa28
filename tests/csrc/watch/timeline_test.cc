// SPDX-License-Identifier: Apache-2.0
// The timeline's threads: many that add, one that writes, one that starts and stops.
#include "watch/timeline.h"

#include <memory>
#include <thread>

#include "base/clock.h"
#include "check.h"
#include "folder.h"
#include "lib/os/text_file.h"

namespace farandole {
namespace {

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

std::unique_ptr<FlightPage> page() {
  auto made = std::make_unique<FlightPage>();
  FlightPage::Identity identity{};
  identity.rank = 3;
  identity.size = 4;
  made->identity.write(0, identity);
  return made;
}

FlightEvent wait_event() {
  FlightEvent event;
  event.kind = EventKind::kWait;
  event.time_ns = 1'500'000;
  event.value = 2'001;
  return event;
}

const char* const kTrace = R"trace([
{"ph":"M","name":"process_name","pid":3,"args":{"name":"rank 3"}},
{"ph":"M","name":"process_sort_index","pid":3,"args":{"sort_index":3}},
{"ph":"M","name":"farandole","pid":3,"args":{"rank":3,"size":4,"epoch_minus_monotonic_ns":N,"start_time_since_epoch_in_micros":N}},
{"ph":"M","name":"thread_name","pid":3,"tid":11,"args":{"name":"thread 11"}},
{"ph":"X","cat":"submit","name":"grad","pid":3,"ts":1.000,"dur":1.000,"tid":11,"args":{"op":"allreduce","dtype":"float32","bytes":48,"shape":[3,4],"process_set":2}},
{"ph":"s","cat":"bucket","name":"to its bucket","pid":3,"ts":1.000,"id":3,"tid":11},
{"ph":"b","cat":"tensor","name":"allreduce.grad","pid":3,"ts":1.000,"id":3,"tid":99999999},
{"ph":"b","cat":"tensor","name":"NEGOTIATE_ALLREDUCE","pid":3,"ts":1.000,"id":3,"tid":99999999},
{"ph":"X","cat":"submit","name":"unnamed 5","pid":3,"ts":2.000,"dur":1.000,"tid":11,"args":{"op":"allreduce","dtype":"float32","bytes":0,"shape":[0,0,0,0,0,0],"process_set":0}},
{"ph":"s","cat":"bucket","name":"to its bucket","pid":3,"ts":2.000,"id":7,"tid":11},
{"ph":"b","cat":"tensor","name":"allreduce.unnamed 5","pid":3,"ts":2.000,"id":7,"tid":99999999},
{"ph":"b","cat":"tensor","name":"NEGOTIATE_ALLREDUCE","pid":3,"ts":2.000,"id":7,"tid":99999999},
{"ph":"e","cat":"tensor","name":"NEGOTIATE_ALLREDUCE","pid":3,"ts":3.000,"id":3,"tid":99999999},
{"ph":"b","cat":"tensor","name":"QUEUE","pid":3,"ts":3.000,"id":3,"tid":99999999},
{"ph":"e","cat":"tensor","name":"NEGOTIATE_ALLREDUCE","pid":3,"ts":4.000,"id":7,"tid":99999999},
{"ph":"b","cat":"tensor","name":"FINISH","pid":3,"ts":4.000,"id":7,"tid":99999999},
{"ph":"e","cat":"tensor","name":"FINISH","pid":3,"ts":5.000,"id":7,"tid":99999999},
{"ph":"e","cat":"tensor","name":"allreduce.unnamed 5","pid":3,"ts":5.000,"id":7,"tid":99999999,"args":{"error":6}},
{"ph":"M","name":"thread_name","pid":3,"tid":100000002,"args":{"name":"lane of process set 2"}},
{"ph":"f","cat":"bucket","name":"to its bucket","pid":3,"ts":6.000,"bp":"e","id":3,"tid":100000002},
{"ph":"e","cat":"tensor","name":"QUEUE","pid":3,"ts":6.000,"id":3,"tid":99999999},
{"ph":"b","cat":"tensor","name":"MOVE","pid":3,"ts":6.000,"id":3,"tid":99999999},
{"ph":"X","cat":"block","name":"pack","pid":3,"ts":7.000,"dur":1.000,"tid":100000002,"args":{}},
{"ph":"X","cat":"block","name":"reduce","pid":3,"ts":8.000,"dur":1.500,"tid":100000002,"args":{}},
{"ph":"X","cat":"block","name":"unpack","pid":3,"ts":10.000,"dur":1.000,"tid":100000002,"args":{}},
{"ph":"X","cat":"bucket","name":"bucket 9","pid":3,"ts":6.000,"dur":6.000,"tid":100000002,"args":{"bytes":48}},
{"ph":"e","cat":"tensor","name":"MOVE","pid":3,"ts":13.000,"id":3,"tid":99999999},
{"ph":"e","cat":"tensor","name":"allreduce.grad","pid":3,"ts":13.000,"id":3,"tid":99999999,"args":{}},
{"ph":"X","cat":"wait","name":"wait","pid":3,"ts":1.000,"dur":12.500,"tid":11,"args":{"for":"grad"}},
{"ph":"i","cat":"peer","name":"rank 1 died","pid":3,"ts":15.000,"s":"p","tid":11},
{"ph":"M","name":"thread_name","pid":3,"tid":0,"args":{"name":"main thread"}},
{"ph":"i","cat":"cycle","name":"CYCLE_START","pid":3,"ts":16.000,"s":"p","tid":0},
{"ph":"M","name":"thread_name","pid":3,"tid":99999998,"args":{"name":"messages"}},
{"ph":"X","cat":"block","name":"pack","pid":3,"ts":17.000,"dur":1.000,"tid":99999998,"args":{}}
])trace";

TEST(nothing_is_lost_between_threads) {
  const check::Folder folder;
  auto memory = page();
  Timeline timeline(*memory);
  constexpr int kThreads = 3;
  constexpr int kEvents = 20'000;
  timeline.start(folder.path("t.json"), false);
  check::in_threads(kThreads, [&](int) {
    for (int i = 0; i < kEvents; ++i) timeline.add(wait_event());
  });
  timeline.stop();
  const std::string text = read_text_file(folder.path("t.json"));
  CHECK_EQ(count(text, "\"cat\":\"wait\""), kThreads * kEvents);
  CHECK(text.find("\"pid\":3,\"ts\":1500.000,\"dur\":2.001") != std::string::npos);
  CHECK_EQ(text.front(), '[');
  CHECK_EQ(text.back(), ']');
}

// Names, numbers and places of every kind of event.
TEST(a_trace_follows_calls_from_submission_to_their_ends) {
  const check::Folder folder;
  auto memory = page();
  Labels labels(memory->labels);
  const FlightEvent named{.call = 70, .bytes = 48, .name = labels.label_of("grad"), .set = 2};
  const auto event = [&](FlightEvent made, int64_t time_us, EventKind kind, uint64_t bucket) {
    made.time_ns = time_us * 1000;
    made.kind = kind;
    made.bucket = bucket;
    made.thread = kind == EventKind::kCycle ? 0 : 11;
    made.op = static_cast<uint8_t>(Op::kAllreduce);
    made.dtype = static_cast<uint8_t>(DType::kFloat32);
    return made;
  };
  FlightEvent grad = event(named, 1, EventKind::kSubmit, 0);
  grad.dimensions = 2;
  grad.shape[0] = 3, grad.shape[1] = 4;
  FlightEvent unnamed = event({.call = 71, .sequence = 5}, 2, EventKind::kSubmit, 0);
  unnamed.dimensions = 200;  // more than are kept
  TraceFile trace(folder.path("t.json"), *memory);
  for (const FlightEvent& each : {
           grad,
           unnamed,
           event(named, 3, EventKind::kNegotiated, 9),
           event({.call = 71}, 4, EventKind::kNegotiated, 0),
           event({.call = 71, .value = 6}, 5, EventKind::kError, 0),
           event({.value = 6}, 5, EventKind::kError, 0),  // the job's
           event({.set = 2}, 6, EventKind::kLaunched, 9),
           event({.value = 1000, .set = 2}, 7, EventKind::kStage, 9),
           event({.value = 1500, .set = 2}, 8, EventKind::kReduce, 9),
           event({.value = 1000, .set = 2}, 10, EventKind::kConsume, 9),
           event({.bytes = 48, .value = 6000, .set = 2}, 12, EventKind::kDone, 9),
           event(named, 13, EventKind::kDone, 9),
           event(named, 14, EventKind::kDone, 9),  // a call that this trace does not follow
           event({.value = 12'500, .name = named.name}, 1, EventKind::kWait, 0),
           event({.value = 1}, 15, EventKind::kPeerDied, 0),
           event({}, 16, EventKind::kCycle, 0),
           event({.value = 1000, .set = -3}, 17, EventKind::kStage, 1),  // a message
       }) {
    trace.write(each);
  }
  trace.close(0);
  CHECK_EQ(check::without_clocks(read_text_file(folder.path("t.json"))), kTrace);
}

TEST(it_can_be_read_while_it_is_written) {
  const check::Folder folder;
  auto memory = page();
  Timeline timeline(*memory);
  timeline.start(folder.path("t.json"), false);
  timeline.add(wait_event());
  const Deadline deadline = Deadline::in(std::chrono::seconds(20));
  while (count(read_text_file(folder.path("t.json")), "\"cat\":\"wait\"") == 0) {
    CHECK(!deadline.expired());
    std::this_thread::yield();
  }
  timeline.stop();
}

TEST(start_and_stop_beside_writers) {
  const check::Folder folder;
  auto memory = page();
  Timeline timeline(*memory);
  std::atomic<bool> over{false};
  std::thread writer([&] {
    while (!over) {
      if (timeline.listening()) timeline.add(wait_event());
    }
  });
  for (int round = 0; round < 20; ++round) {
    timeline.start(folder.path("t.json"), true);
    CHECK_THROWS(timeline.start(folder.path("t.json"), true), ErrorCode::kInvalidArgument);
    CHECK(timeline.marks_cycles());
    timeline.stop();
    timeline.stop();
    CHECK_EQ(read_text_file(folder.path("t.json")).back(), ']');
  }
  over = true;
  writer.join();
}

TEST(a_file_that_cannot_be_made_is_an_error) {
  auto memory = page();
  Timeline timeline(*memory);
  CHECK_THROWS(timeline.start("/nowhere/at/all.json", false), ErrorCode::kLibrary);
  CHECK(!timeline.listening());
}

TEST(each_rank_has_its_file) {
  CHECK_EQ(timeline_path("run.json", 0), "run.json");
  CHECK_EQ(timeline_path("run.json", 12), "run.rank12.json");
  CHECK_EQ(timeline_path("a.b/run", 1), "a.b/run.rank1");
  CHECK_EQ(timeline_path("/x/.hidden", 1), "/x/.hidden.rank1");
}

}  // namespace
}  // namespace farandole
