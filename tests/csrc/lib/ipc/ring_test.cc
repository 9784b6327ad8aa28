// SPDX-License-Identifier: Apache-2.0
#include "lib/ipc/ring.h"

#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <thread>

#include "check.h"
#include "lib/ipc/event_count.h"
#include "lib/ipc/segment.h"

namespace farandole {
namespace {

constexpr size_t kSmall = 64;
constexpr size_t kCapacity = 1024;

// Zeroed memory of a ring, as a fresh segment is.
class Memory {
 public:
  explicit Memory(size_t capacity)
      : segment_(Segment::create("ring", RingMemory::bytes(capacity), true)) {}
  std::byte* get() const { return segment_.data(); }
  RingHeader& header() const { return *reinterpret_cast<RingHeader*>(get()); }
  std::byte* records() const { return get() + sizeof(RingHeader); }

 private:
  Segment segment_;
};

// The i-th record of a stream: its length and every byte follow from `i` and the stream.
std::vector<std::byte> record_of(uint32_t stream, uint32_t i, size_t longest) {
  std::minstd_rand random(stream * 7919 + i + 1);
  std::vector<std::byte> record(1 + random() % longest);
  for (std::byte& byte : record) byte = static_cast<std::byte>(random());
  return record;
}

bool same(Bytes a, Bytes b) { return std::ranges::equal(a, b); }

Bytes text(const char* words) { return std::as_bytes(std::span(words, std::strlen(words))); }

// Both directions of one connection between a writer and a reader that sleep.
struct Wakeups {
  EventCount reader_count;
  EventCount writer_count;
  Wakeup reader() { return reader_count; }
  Wakeup writer() { return writer_count; }
};

void write_stream(std::byte* memory, Wakeups& wakeups, uint32_t stream, uint32_t records) {
  RingWriter writer(memory, kCapacity);
  for (uint32_t i = 0; i < records; ++i) {
    const std::vector<std::byte> record = record_of(stream, i, writer.max_record());
    const size_t half = record.size() / 2;
    const auto push = [&] {
      return writer.try_push(Bytes(record).first(half), Bytes(record).subspan(half));
    };
    while (!push()) {
      writer.want_room();
      if (push()) break;  // the reader may have made room before it could see the request
      wakeups.reader().notify();
      const auto granted = [&] { return writer.room_granted(); };
      wakeups.writer().wait(Sleeper::kCaller, wakeups.writer().prepare(), granted,
                            Deadline::never());
    }
    wakeups.reader().notify();
  }
  CHECK_EQ(rescued_wakeups(), 0);
}

void read_stream(std::byte* memory, Wakeups& wakeups, uint32_t stream, uint32_t records) {
  RingReader reader(memory, kCapacity);
  for (uint32_t i = 0; i < records; ++i) {
    while (reader.empty()) {
      const auto filled = [&] { return !reader.empty(); };
      wakeups.reader().wait(Sleeper::kCaller, wakeups.reader().prepare(), filled,
                            Deadline::never());
    }
    CHECK(same(reader.front(), record_of(stream, i, reader.max_record())));
    if (reader.pop()) wakeups.writer().notify();
  }
  CHECK(reader.empty());
  CHECK_EQ(rescued_wakeups(), 0);
}

}  // namespace

TEST(records_come_out_as_they_went_in) {
  const Memory memory(kCapacity);
  RingWriter writer(memory.get(), kCapacity);
  RingReader reader(memory.get(), kCapacity);
  CHECK(reader.empty());
  CHECK(writer.try_push(text("all hold"), text(" hands")));
  CHECK(!reader.empty());
  CHECK(same(reader.front(), text("all hold hands")));
  CHECK(same(reader.front(), text("all hold hands")));
  CHECK_EQ(reinterpret_cast<uintptr_t>(reader.front().data()) % 8, 0);
  CHECK(!reader.pop());
  CHECK(reader.empty());
}

TEST(random_records_wrap_around_rings_of_every_size) {
  for (size_t capacity = kSmall; capacity <= 4096; capacity *= 2) {
    const Memory memory(capacity);
    RingWriter writer(memory.get(), capacity);
    RingReader reader(memory.get(), capacity);
    std::minstd_rand random(static_cast<uint32_t>(capacity));
    uint32_t pushed = 0;
    uint32_t popped = 0;
    while (popped < 5000) {
      if (random() % 2 == 0) {
        pushed += writer.try_push(record_of(1, pushed, writer.max_record()));
      } else if (popped < pushed) {
        CHECK(same(reader.front(), record_of(1, popped++, reader.max_record())));
        reader.pop();
      } else {
        CHECK(reader.front().empty());
      }
    }
  }
}

TEST(a_full_ring_refuses_and_says_when_there_is_room) {
  const Memory memory(kSmall);
  RingWriter writer(memory.get(), kSmall);
  RingReader reader(memory.get(), kSmall);
  while (writer.try_push(text("12345678"))) continue;
  writer.want_room();
  CHECK(!writer.try_push(text("12345678")));
  CHECK(!writer.room_granted());
  CHECK(same(reader.front(), text("12345678")));
  CHECK(!reader.pop());  // not yet worth a wake-up
  reader.front();
  CHECK(reader.pop());  // asked for, and half of the ring is free
  CHECK(writer.room_granted());
  CHECK(writer.try_push(text("12345678")));
  reader.front();
  CHECK(!reader.pop());  // not asked for
}

TEST(the_longest_record_fits_an_empty_ring_wherever_it_stands) {
  for (size_t capacity = kSmall; capacity <= 1024; capacity *= 2) {
    const Memory memory(capacity);
    RingWriter writer(memory.get(), capacity);
    RingReader reader(memory.get(), capacity);
    const std::vector<std::byte> longest(writer.max_record(), std::byte{7});
    for (size_t i = 0; i < capacity; ++i) {
      CHECK(writer.try_push(i % 3 == 0 ? Bytes(longest) : text("x")));
      CHECK(!reader.front().empty());
      reader.pop();
    }
  }
}

TEST(wrong_use_is_an_error) {
  const Memory memory(kSmall);
  RingWriter writer(memory.get(), kSmall);
  RingReader reader(memory.get(), kSmall);
  const std::vector<std::byte> too_long(writer.max_record() + 1);
  CHECK_THROWS(writer.try_push(too_long), ErrorCode::kInternal);
  CHECK_THROWS(writer.try_push({}), ErrorCode::kInternal);
  CHECK_THROWS(reader.pop(), ErrorCode::kInternal);
  CHECK_THROWS(RingReader(memory.get(), 48), ErrorCode::kInternal);
  CHECK_THROWS(RingReader(memory.get() + 8, kSmall), ErrorCode::kInternal);
}

TEST(an_end_opens_only_a_ring_whose_other_end_is_sound) {
  const Memory memory(kSmall);
  for (const uint64_t head : {uint64_t{4}, uint64_t{kSmall + 8}}) {
    memory.header().head.store(head);
    CHECK_THROWS(RingWriter(memory.get(), kSmall), ErrorCode::kInternal);
  }
  memory.header().head.store(kSmall);
  CHECK(!RingWriter(memory.get(), kSmall).try_push(text("full")));
  memory.header().tail.store(4);
  CHECK_THROWS(RingReader(memory.get(), kSmall), ErrorCode::kInternal);
}

TEST(corrupt_memory_is_an_error_for_the_reader) {
  const auto corrupt = [](auto&& change) {
    const Memory memory(kCapacity);
    RingWriter writer(memory.get(), kCapacity);
    RingReader reader(memory.get(), kCapacity);
    CHECK(writer.try_push(text("good")));
    change(memory);
    CHECK_THROWS(reader.front(), ErrorCode::kInternal);
  };
  const auto set_prefix = [](const Memory& memory, uint32_t length) {
    const uint32_t prefix[2] = {length, ~length};
    std::memcpy(memory.records(), prefix, sizeof(prefix));
  };
  corrupt([](const Memory& m) { m.header().head.store(kCapacity + 8); });
  corrupt([](const Memory& m) { m.header().head.store(~uint64_t{0} - 7); });
  corrupt([](const Memory& m) { m.header().head.store(12); });
  corrupt([](const Memory& m) { m.records()[0] ^= std::byte{1}; });  // without its complement
  corrupt([&](const Memory& m) { set_prefix(m, 0); });
  corrupt([&](const Memory& m) { set_prefix(m, 9); });  // longer than what is published
  corrupt([&](const Memory& m) { set_prefix(m, kCapacity / 4 + 1); });
  corrupt([&](const Memory& m) { set_prefix(m, ~uint32_t{0} - 1); });
  corrupt([&](const Memory& m) { set_prefix(m, ~uint32_t{0}); });  // wraps, nothing follows
}

TEST(corrupt_memory_is_an_error_for_the_writer) {
  for (const uint64_t tail : {uint64_t{8}, uint64_t{kSmall * 2}, ~uint64_t{0} - 1023}) {
    const Memory memory(kSmall);
    RingWriter writer(memory.get(), kSmall);
    RingReader reader(memory.get(), kSmall);
    CHECK(writer.try_push(text("1234567812345678")));
    CHECK(writer.try_push(text("1234567812345678")));
    reader.front();
    reader.pop();
    CHECK(writer.try_push(text("1234567812345678")));  // reads the tail: 24 bytes were consumed
    memory.header().tail.store(tail);
    CHECK_THROWS(writer.try_push(text("1234567812345678")), ErrorCode::kInternal);
  }
}

TEST(random_bytes_in_a_ring_never_lead_outside) {
  std::minstd_rand random(42);
  for (int i = 0; i < 20'000; ++i) {
    struct {
      RingHeader header;
      std::byte records[kSmall];
    } memory{};  // AddressSanitizer sees what is read behind it
    auto* base = reinterpret_cast<std::byte*>(&memory);
    memory.header.head.store(random() % 12 * 8);
    for (size_t word = 0; word < kSmall / 8; ++word) {
      const uint32_t length = random() % 5 == 0 ? ~uint32_t{0} : random() % 20;
      const uint32_t prefix[2] = {length, ~length};
      std::memcpy(memory.records + word * 8, prefix, sizeof(prefix));
    }
    RingReader reader(base, kSmall);
    try {
      for (Bytes record = reader.front(); !record.empty(); record = reader.front()) {
        const std::byte* end = base + RingMemory::bytes(kSmall);
        CHECK(record.data() > base && record.data() + record.size() <= end);
        reader.pop();
      }
    } catch (const Error& error) {
      CHECK_EQ(error.code(), ErrorCode::kInternal);
    }
  }
}

TEST(threads_stream_records) {
  const Memory memory(kCapacity);
  Wakeups wakeups;
  std::thread writer([&] { write_stream(memory.get(), wakeups, 5, 20'000); });
  read_stream(memory.get(), wakeups, 5, 20'000);
  writer.join();
}

TEST(forked_processes_stream_records) {
  const Memory memory(kCapacity);
  const Segment segment = Segment::create("wakeups", sizeof(Wakeups), true);
  Wakeups& wakeups = *reinterpret_cast<Wakeups*>(segment.data());
  check::run_in_forks(2, [&](int rank) {
    if (rank == 0) return write_stream(memory.get(), wakeups, 9, 20'000);
    read_stream(memory.get(), wakeups, 9, 20'000);
  });
}

TEST(a_writer_killed_anywhere_leaves_whole_records_only) {
  constexpr uint32_t kStream = 11;
  for (uint32_t victim = 0; victim < 8; ++victim) {
    const Memory memory(kCapacity);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      RingWriter writer(memory.get(), kCapacity);
      for (uint32_t i = 0;;) {
        const bool pushed = writer.try_push(record_of(kStream, i, writer.max_record()));
        i += pushed;
        if (!pushed) sched_yield();
      }
    }
    RingReader reader(memory.get(), kCapacity);
    uint32_t read = 0;
    const auto read_one = [&] {
      CHECK(same(reader.front(), record_of(kStream, read++, reader.max_record())));
      reader.pop();
    };
    while (read < 200 + victim * 13) {
      while (reader.empty()) sched_yield();
      read_one();
    }
    kill(child, SIGKILL);
    CHECK_EQ(waitpid(child, nullptr, 0), child);
    while (!reader.empty()) read_one();
    CHECK(reader.front().empty());
  }
}

}  // namespace farandole
