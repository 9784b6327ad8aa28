// SPDX-License-Identifier: Apache-2.0
// The flight recorder's memory: what readers see while others write, wrap around, or die.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <memory>
#include <thread>

#include "base/clock.h"
#include "base/json.h"
#include "check.h"
#include "folder.h"
#include "lib/ipc/segment.h"
#include "watch/flight_text.h"
#include "watch/recorder.h"

namespace farandole {
namespace {

// All words of it tell the same number.
struct Value {
  uint64_t words[15];
  static Value of(uint64_t number) {
    Value value;
    for (uint64_t& word : value.words) word = number;
    return value;
  }
  bool whole(uint64_t number) const {
    for (uint64_t word : words) {
      if (word != number) return false;
    }
    return true;
  }
};

struct Memory {
  explicit Memory(int locals = 1, int ranks = 1)
      : segment(Segment::create("flight-test", FlightMemory::bytes_needed(locals, ranks), true)),
        flight(segment.data(), locals, ranks) {
    flight.prepare();
  }
  Segment segment;
  FlightMemory flight;
};

RecordedCall call_of(int64_t number) {
  RecordedCall call;
  call.call = number;
  call.bytes = static_cast<uint64_t>(number) * 3;
  call.bucket = static_cast<uint64_t>(number) * 5;
  call.set = static_cast<SetId>(number % 7);
  return call;
}
bool consistent(const FlightEvent& event) {
  const auto number = static_cast<uint64_t>(event.call);
  return event.bytes == number * 3 && event.bucket == number * 5 &&
         event.set == static_cast<SetId>(number % 7);
}

// As a reader writes it down, with so many events.
std::string written(const FlightMemory& flight, size_t events = 1, const char* why = "") {
  Json json;
  write_flight(json, flight, 0, events, why);
  return json.text();
}

int readable(const FlightPage& page) {
  int whole = 0;
  for (const auto& slot : page.events) {
    if (const auto seen = slot.read()) {
      CHECK(consistent(seen->value));
      ++whole;
    }
  }
  return whole;
}

TEST(readers_never_see_half_a_value) {
  auto slot = std::make_unique<Stamped<Value>>();
  std::atomic<uint64_t> next{0};
  std::atomic<uint64_t> written{0};
  std::vector<std::thread> writers;
  for (int w = 0; w < 2; ++w) {
    writers.emplace_back([&] {
      for (uint64_t number = next++; number < 20'000; number = next++) {
        written += slot->write(number, Value::of(number));
      }
    });
  }
  uint64_t last = 0;
  while (next.load() < 20'000) {
    const auto seen = slot->read();
    if (!seen) continue;
    CHECK(seen->value.whole(seen->number));
    CHECK(seen->number >= last);
    last = seen->number;
  }
  for (std::thread& writer : writers) writer.join();
  CHECK(written.load() > 0);
  CHECK(slot->read()->value.whole(slot->read()->number));
}

TEST(a_late_or_concurrent_writer_changes_nothing) {
  auto slot = std::make_unique<Stamped<Value>>();
  CHECK(!slot->read());
  CHECK(slot->write(9, Value::of(9)));
  CHECK(!slot->write(8, Value::of(8)));
  CHECK_EQ(slot->read()->number, 9);
  const uint64_t half_written = 2 * 10 + 1;
  *reinterpret_cast<uint64_t*>(slot.get()) = half_written;
  CHECK(!slot->read());
  CHECK(!slot->write(11, Value::of(11)));
}

TEST(the_ring_keeps_the_last_events) {
  Memory memory;
  Recorder recorder(memory.flight, 0, {});
  constexpr int64_t kCount = 3 * FlightPage::kEvents + 17;
  for (int64_t n = 1; n <= kCount; ++n) recorder.done(call_of(n), now_ns());
  const FlightPage& page = memory.flight.page(0);
  CHECK_EQ(page.recorded.load(), kCount);
  CHECK_EQ(page.dropped.load(), 0);
  CHECK_EQ(readable(page), FlightPage::kEvents);
  for (const auto& slot : page.events) CHECK(slot.read()->value.call > kCount - 4096);
  // The writer of the next slot has died while it wrote.
  auto& next = memory.flight.page(0).events[kCount % FlightPage::kEvents];
  *reinterpret_cast<uint64_t*>(&next) = 1;
  recorder.done(call_of(kCount + 1), now_ns());
  CHECK_EQ(page.dropped.load(), 1);
}

// The slot of its event holds an older one.
TEST(an_event_whose_writer_died_before_it_wrote_is_skipped) {
  Memory memory;
  Recorder recorder(memory.flight, 0, {});
  for (size_t n = 1; n <= FlightPage::kEvents; ++n) {
    recorder.done(call_of(static_cast<int64_t>(n)), now_ns());
  }
  memory.flight.page(0).recorded.fetch_add(1);
  const std::string seen = written(memory.flight, FlightPage::kEvents);
  CHECK(check::contains(seen, "\"call\":2,") && !check::contains(seen, "\"call\":1,"));
}

TEST(a_call_that_ends_twice_closes_no_other) {
  Memory memory;
  Recorder recorder(memory.flight, 0, {});
  RecordedCall first = call_of(7), second = call_of(8), third = call_of(9);
  recorder.submitted(first, 0, {});
  recorder.done(first, now_ns());
  recorder.submitted(second, 1, {});  // in the place of the first
  recorder.done(first, now_ns());
  recorder.submitted(third, 2, {});
  const std::string seen = written(memory.flight);
  CHECK(check::contains(seen, "\"call\":8,") && check::contains(seen, "\"call\":9,"));
}

TEST(a_rank_that_has_left_has_neither_died_nor_failed) {
  Memory memory(2, 2);
  Recorder leaves(memory.flight, 0, {}), watches(memory.flight, 1, {});
  leaves.left();
  leaves.job_failed({ErrorCode::kShutdown, "all have left"});
  watches.peer_died(0, 0);
  CHECK(memory.flight.page(0).state == LifeState::kLeft);
}

TEST(a_wait_that_is_interrupted_goes_on) {
  Memory memory;
  Recorder recorder(memory.flight, 0, {});
  const Tally& tally = memory.flight.page(0).tally;
  const uint32_t name = recorder.label_of("grad");
  recorder.wait_begins(7, name);
  const int64_t since = tally.waiting_since_ns;
  CHECK(since > 0);
  recorder.wait_ends(false);
  CHECK_EQ(tally.waiting_since_ns.load(), since);
  recorder.wait_begins(7, name);
  std::thread([&] {
    recorder.wait_begins(8, recorder.label_of("of another thread"));
    recorder.wait_ends(true);
  }).join();
  CHECK_EQ(tally.waiting_for.load(), name);
  CHECK_EQ(tally.waiting_since_ns.load(), since);
  recorder.wait_ends(false);
  const int64_t now = now_ns();
  recorder.wait_begins(9, name);  // the program has given up the other wait
  CHECK(tally.waiting_since_ns >= now);
  recorder.wait_ends(true);
  CHECK_EQ(tally.waiting_since_ns.load(), 0);
}

TEST(the_first_living_rank_dumps_the_dead_ones) {
  const check::Folder folder;
  Memory memory(3, 3);
  std::vector<std::unique_ptr<Recorder>> recorders;
  for (int rank = 0; rank < 3; ++rank) {
    FlightPage::Identity identity{};
    identity.rank = rank, identity.size = 3;
    recorders.push_back(std::make_unique<Recorder>(memory.flight, rank, identity, folder.path()));
  }
  const auto dumped = [&](int rank) {
    return std::filesystem::exists(folder.path("flight-rank-" + std::to_string(rank) + ".json"));
  };
  recorders[0]->peer_died(2, 2);
  recorders[1]->job_failed({ErrorCode::kPeer, "rank 2 died"});
  CHECK(!dumped(0) && dumped(1) && !dumped(2));
  recorders[0]->job_failed({ErrorCode::kShutdown, "all have left"});  // no reason for a dump
  CHECK(!dumped(0) && !dumped(2));
  recorders[0]->job_failed({ErrorCode::kPeer, "rank 2 died"});
  CHECK(dumped(0) && dumped(2));
}

TEST(lines_fill_their_memory_to_the_last_byte) {
  Memory memory;
  FlightPage& page = memory.flight.page(0);
  add_line(page.story, std::string(FlightText::kBytes + 1, 'x'));
  CHECK_EQ(page.story.read()->value.length, FlightText::kBytes);
  add_line(page.findings, "a");
  add_line(page.findings, std::string(FlightText::kBytes - 2, 'x'));
  CHECK_EQ(page.findings.read()->value.length, FlightText::kBytes);
}

TEST(open_calls_outlive_the_ring) {
  Memory memory;
  Recorder recorder(memory.flight, 0, {});
  const std::vector<int64_t> shape{3, 4};
  RecordedCall waits = call_of(7), agreed = call_of(8);
  recorder.submitted(waits, 9, shape);
  recorder.submitted(agreed, 10, shape);
  recorder.negotiated(agreed, 21, 77, now_ns());
  for (size_t n = 0; n < FlightPage::kEvents; ++n) {
    RecordedCall other = call_of(static_cast<int64_t>(n) << 32 | 9);
    recorder.submitted(other, n, shape);
    recorder.done(other, now_ns());
  }
  const std::string text = written(memory.flight);
  auto holds = [&](const char* part) { return check::contains(text, part); };
  CHECK(holds("\"position\":0,"));
  CHECK(holds("\"position\":77,\"agreed_bucket\":21,"));
  CHECK(holds("\"call\":7,") && holds("\"call\":8,") && holds("\"shape\":[3,4]"));
  CHECK(!holds("\"call\":9,"));
  recorder.done(waits, now_ns());
  recorder.failed(agreed, {ErrorCode::kStall, "too late"});
  CHECK(check::contains(written(memory.flight), "\"open\":[]"));
}

TEST(a_call_is_shown_with_its_line_and_findings_stay) {
  Memory memory;
  Recorder recorder(memory.flight, 0, {});
  RecordedCall call = call_of(7), unknown = call_of(8);
  call.site = recorder.label_of("train.py:12");
  const std::vector<int64_t> shape{1, 2, 3, 4, 5, 6, 7};
  recorder.submitted(call, 0, shape);
  recorder.submitted(unknown, 1, shape);
  const std::string most(FlightText::kBytes - 40, 'x');
  for (const std::string& text : {std::string("one thing"), std::string("another"), most, most}) {
    add_line(memory.flight.page(0).findings, text);
  }
  const std::string seen = written(memory.flight, 2);
  const auto holds = [&](const std::string& part) { return check::contains(seen, part); };
  CHECK(holds("\"call\":7,"));
  CHECK(holds("\"shape\":[1,2,3,4,5,6],\"site\":\"train.py:12\",\"bytes\""));
  CHECK(holds("\"shape\":[1,2,3,4,5,6],\"bytes\""));
  CHECK(holds("\"findings\":\"one thing\\u000aanother\\u000a" + most +
              "\""));  // as many as there is room for
}

const char* const kPage =
    R"json({"format":"farandole-flight-2","rank":3,"size":5,"world":2,"local_rank":1,N,"pid":77,"state":"running",
"began_ns":N,"now_ns":N,"epoch_minus_monotonic_ns":N,
"reason":"asked",
"failure":{"code":4,"text":"other shapes"},
"story":"a world of five",
"sets":{"2":"3,4","8":"0,1,3"},
"counters":{"tensors_submitted":3,"tensors_done":1,"tensors_failed":1,"bytes_done":48,"buckets_done":1,"moving_ns":N},
"histograms":{"negotiation_ns":{"count":2,"sum":5000,"slots":[1,0,0,0,0,0,0,0,0,0,0,0,0,1]},"wait_ns":{"count":0,"sum":0,"slots":[]},"bucket_bytes":{"count":1,"sum":48,"slots":[0,0,0,0,0,0,1]},"bandwidth_MBps":{"count":1,"sum":0,"slots":[1]}},
"now":{"waiters":1,"waiting_for":"to rank 4","waiting_since_ns":N,"moving_since_ns":N},
"late":{"times":2,"ns":1500},
"recorded":11,"dropped":0,
"open":[
{"position":22,"agreed_bucket":1,"lane":0,"negotiated":N,"t":N,"kind":"submit","set":0,N,"call":71,"name":"","op":"send","dtype":"uint8","shape":[],"bytes":0,"seq":1,"tag":15,"peer":4}],
"events":[
{"t":N,"kind":"submit","set":2,N,"call":70,"name":"grad","op":"allreduce","dtype":"float32","shape":[3,4],"bytes":48,"seq":0,"bucket":0,"value":0},
{"t":N,"kind":"submit","set":0,N,"call":71,"name":"","op":"send","dtype":"uint8","shape":[],"bytes":0,"seq":1,"tag":15,"peer":4},
{"t":N,"kind":"submit","set":0,N,"call":72,"name":"","op":"broadcast","dtype":"uint8","shape":[],"bytes":3,"seq":6,"bucket":0,"value":0},
{"t":N,"kind":"negotiated","set":2,N,"call":70,"name":"grad","op":"allreduce","dtype":"float32","bytes":48,"seq":21,"bucket":9,"value":0},
{"t":N,"kind":"negotiated","set":0,N,"call":71,"name":"","op":"send","dtype":"uint8","bytes":0,"seq":22,"bucket":1,"value":0},
{"t":N,"kind":"launched","set":2,N,"bytes":48,"seq":0,"bucket":9,"value":1},
{"t":N,"kind":"done","set":2,N,"bytes":48,"seq":0,"bucket":9,"value":N},
{"t":N,"kind":"done","set":2,N,"call":70,"name":"grad","op":"allreduce","dtype":"float32","bytes":48,"seq":0,"bucket":9,"value":0},
{"t":N,"kind":"error","set":0,N,"call":72,"name":"","op":"broadcast","dtype":"uint8","bytes":3,"seq":0,"bucket":0,"value":4},
{"t":N,"kind":"peer died","set":0,N,"bytes":0,"seq":0,"bucket":0,"value":4},
{"t":N,"kind":"launched","set":2,N,"bytes":16,"seq":0,"bucket":10,"value":1}
]})json";

// Replaces each member of this name with N.
std::string without(std::string text, const std::string& name) {
  const std::string key = "\"" + name + "\":";
  for (size_t at = text.find(key); at != std::string::npos; at = text.find(key, at)) {
    text.replace(at, text.find(',', at) - at, "N");
  }
  return text;
}

// All that a page may hold, each number of it different.
TEST(a_page_is_written_down_whole) {
  Memory memory(2, 5);
  Recorder recorder(memory.flight, 1, {3, 5, 2, 77, 0, 1'000'000'000});
  recorder.open_set(2, {3, 4});
  recorder.open_set(7, {1, 3});
  recorder.open_set(8, {0, 1, 3});
  recorder.close_set(7);
  recorder.tell_story("a world of five");
  RecordedCall grad, send, wrong;
  grad.call = 70, grad.set = 2, grad.bytes = 48, grad.name = recorder.label_of("grad");
  grad.dtype = DType::kFloat32;
  send.call = 71, send.op = Op::kSend, send.peer = 4, send.tag = 15;
  wrong.call = 72, wrong.op = Op::kBroadcast, wrong.bytes = 3;
  recorder.submitted(grad, 0, std::vector<int64_t>{3, 4});
  recorder.submitted(send, 1, {});
  recorder.submitted(wrong, 6, {});
  recorder.negotiated(grad, 9, 21, grad.submitted_ns + 5000);
  recorder.negotiated(send, 1, 22, send.submitted_ns - 1);  // another clock reading
  recorder.launched(2, 9, 1, 48);
  recorder.moved(2, 9, 48, 0);
  CHECK_EQ(memory.flight.page(1).tally.moving_since_ns.load(), 0);
  recorder.done(grad, now_ns());
  recorder.failed(wrong, {ErrorCode::kMismatch, "other shapes"});
  recorder.peer_died(4, 0);
  CHECK(memory.flight.page(0).state == LifeState::kDied);
  recorder.launched(2, 10, 1, 16);
  recorder.wait_begins(send.call, recorder.label_of("to rank 4"));
  recorder.late(3, 1500);
  recorder.late(3, -1);
  Json json;
  write_flight(json, memory.flight, 1, FlightPage::kEvents, "asked");
  const std::string seen = without(without(std::string(json.text()), "thread"), "host");
  CHECK_EQ(check::without_clocks(seen), kPage);
}

// As many handles as a program likes to keep, and more open calls than there is room for.
TEST(open_calls_are_known_whatever_their_handles_are) {
  Memory memory;
  Recorder recorder(memory.flight, 0, {});
  const auto submitted = [&](int64_t number) {
    RecordedCall call = call_of(number);
    recorder.submitted(call, 0, {});
    return call;
  };
  const auto open = [&](const char* part) {
    const std::string seen = written(memory.flight);
    return check::contains(seen.substr(seen.find("\"open\"")), part);
  };
  constexpr int64_t kKept = 1500;
  for (int64_t n = 1; n <= kKept; ++n) recorder.done(submitted(n), now_ns());
  const RecordedCall late = submitted(kKept + 1);
  CHECK(open("\"call\":1501,"));
  std::vector<RecordedCall> many;
  for (int64_t n = 2000; n < 2000 + kKept; ++n) many.push_back(submitted(n));
  CHECK(open("\"call\":3022,") && !open("\"call\":3023,"));  // there is room for 1,024
  for (const RecordedCall& call : many) recorder.done(call, now_ns());
  CHECK(open("\"call\":1501,") && !open("\"call\":2000,"));
  recorder.done(late, now_ns());
  CHECK(open("\"open\":[]"));
}

TEST(threads_share_the_ring) {
  Memory memory;
  Recorder recorder(memory.flight, 0, {});
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (int64_t n = 1; n <= 10'000; ++n) recorder.done(call_of(n * 3 + t), now_ns());
    });
  }
  for (int look = 0; look < 20; ++look) readable(memory.flight.page(0));
  for (std::thread& thread : threads) thread.join();
  const FlightPage& page = memory.flight.page(0);
  CHECK_EQ(page.recorded.load(), 30'000);
  CHECK(readable(page) + static_cast<int>(page.dropped.load()) >= 4096);
}

TEST(a_killed_writer_leaves_whole_events) {
  for (int round = 0; round < 10; ++round) {
    Memory memory;
    const pid_t child = ::fork();
    if (child == 0) {
      Recorder recorder(memory.flight, 0, {});
      for (int64_t n = 1;; ++n) recorder.done(call_of(n), now_ns());
    }
    const FlightPage& page = memory.flight.page(0);
    while (page.recorded.load() < 5000u + static_cast<unsigned>(round) * 777u) ::sched_yield();
    CHECK_EQ(::kill(child, SIGKILL), 0);
    CHECK_EQ(::waitpid(child, nullptr, 0), child);
    CHECK(readable(page) >= static_cast<int>(FlightPage::kEvents) - 1);
    const std::string seen = written(memory.flight, FlightPage::kEvents, "killed");
    CHECK(check::contains(seen, "\"kind\":\"done\""));
  }
}

TEST(names_are_kept_once_and_bounded) {
  auto memory = std::make_unique<LabelMemory>();
  Labels labels(*memory);
  const uint32_t weight = labels.label_of("layer.weight");
  CHECK_EQ(labels.label_of("layer.weight"), weight);
  CHECK(labels.label_of("layer.bias") != weight);
  CHECK_EQ(memory->at(weight), "layer.weight");
  CHECK_EQ(labels.label_of(""), kNoLabel);
  CHECK_EQ(memory->at(kNoLabel), "");
  CHECK_EQ(memory->at(labels.label_of(std::string(100'000, 'x'))), std::string(1024, 'x'));
  for (uint32_t label = 0; label < 4096; ++label) memory->at(label);  // any number may be asked for
  uint32_t last = 0;
  for (int i = 0; i < 200'000; ++i) last = labels.label_of("name " + std::to_string(i));
  CHECK_EQ(memory->at(last), "(name not kept)");
  CHECK_EQ(memory->at(labels.label_of("layer.weight")), "layer.weight");
  CHECK(memory->used.load() <= LabelMemory::kBytes);
  const size_t end = weight + sizeof(uint32_t) + std::strlen("layer.weight");
  memory->used = end - 1;
  CHECK_EQ(memory->at(weight), "");
  memory->used = end;
  CHECK_EQ(memory->at(weight), "layer.weight");
}

TEST(foreign_memory_is_refused) {
  Memory memory(2, 3);
  std::byte* const data = memory.segment.data();
  CHECK(FlightMemory::attach(data, memory.segment.size()));
  CHECK(!FlightMemory::attach(data, memory.segment.size() - 1));
  CHECK(!FlightMemory::attach(data, 4));
  *reinterpret_cast<uint64_t*>(data) ^= 1;
  CHECK(!FlightMemory::attach(data, memory.segment.size()));
  const Memory vast(1025, 1025);  // a reader would read 1,025 pages for each picture
  CHECK(!FlightMemory::attach(vast.segment.data(), vast.segment.size()));
  const Memory few(2, 1);  // more ranks on the host than in the job
  CHECK(!FlightMemory::attach(few.segment.data(), few.segment.size()));
}

// The numbers are hostile: each is an index into memory of the reader.
TEST(numbers_of_a_hostile_writer_are_checked) {
  Memory memory(1, 2);
  FlightPage& page = memory.flight.page(0);
  FlightEvent event{.call = 1, .name = 0xfffffff0, .op = 255, .dtype = 255, .dimensions = 255};
  event.site = 0x7ffffff0;
  page.events[0].write(0, event);
  page.recorded = UINT64_MAX;
  page.labels.used = UINT64_MAX;
  page.state = static_cast<LifeState>(0x7fffffff);
  page.tally.waiters = 1;
  page.tally.waiting_for = 0x7ffffff0;
  uint64_t number = 0;
  for (const Rank rank : {1 << 30, -(1 << 30), 2, -1}) {
    FlightPage::Identity identity{};
    identity.rank = rank;
    CHECK(page.identity.write(number++, identity));
    const FlightView view(memory.segment.fd());
    CHECK(view.text(0, FlightPage::kEvents).find("\"rank\":0,") != std::string::npos);
  }
}

TEST(json_is_quoted) {
  Json json;
  json.open('{').member("a\"b", "line\nend\\").key("n").open('[').value(1).value(-2);
  json.close(']').key("t").microseconds(-1'234'567).close('}');
  CHECK_EQ(json.text(), "{\"a\\\"b\":\"line\\u000aend\\\\\",\"n\":[1,-2],\"t\":-1234.567}");
}

}  // namespace
}  // namespace farandole
