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
