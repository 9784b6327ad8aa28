// SPDX-License-Identifier: Apache-2.0
#include "control/channel/shm_channel.h"

#include <algorithm>

#include "check.h"
#include "control/protocol/random_messages.h"
#include "lib/ipc/segment.h"

namespace farandole {
namespace {

// One direction of a channel.
struct Line {
  Segment memory = Segment::create("ring", RingMemory::bytes(ShmLayout::kRingBytes));
  MessageWriter writer{memory.data()};
  MessageReader reader{memory.data()};
  bool room = false;  // the reader has told the writer so
};

// The i-th message, some longer than the longest record of the ring.
ByteString message_of(uint64_t i) {
  Random random(i + 1);
  ByteString message(1 + random.below(i % 7 == 0 ? 200'000 : 2000));
  for (std::byte& byte : message) byte = static_cast<std::byte>(random.below(256));
  return message;
}

}  // namespace

TEST(messages_of_any_length_keep_their_order_when_the_ring_is_full) {
  constexpr uint64_t kMessages = 100;
  Line line;
  for (uint64_t i = 0; i < kMessages; ++i) line.writer.push(message_of(i));
  CHECK(!line.writer.can_flush());  // much is queued, and nothing would fit
  bool told = false;
  for (uint64_t i = 0; i < kMessages;) {
    if (const auto message = line.reader.next(line.room)) {
      CHECK(std::ranges::equal(*message, message_of(i++)));
    }
    if (!line.room) continue;
    told = true;
    CHECK(line.writer.can_flush());
    line.writer.flush();
  }
  CHECK(told);
  CHECK(!line.reader.next(line.room));
  CHECK(line.reader.empty());
  CHECK(!line.writer.can_flush());
}

TEST(a_message_that_finds_room_is_there_at_once) {
  Line line;
  for (uint64_t i = 0; i < 1000; ++i) {
    const ByteString message = message_of(7 * i + 1);
    line.writer.push(message);
    CHECK(!line.reader.empty());
    CHECK(std::ranges::equal(line.reader.next(line.room).value(), message));
    CHECK(!line.room);
  }
}

}  // namespace farandole
