// SPDX-License-Identifier: Apache-2.0
// The channel between hosts by a real MPI: a leader that is linked with itself.
#include "control/channel/mpi_channel.h"

#include <poll.h>

#include <memory>
#include <string>

#include "base/clock.h"
#include "channel_inbox.h"
#include "check.h"
#include "lib/mpi/mpi.h"
#include "lib/mpi/mpi_abi.h"
#include "lobby.h"
#include "mpi_process.h"

namespace farandole::check {
namespace {

class Loop {
 public:
  explicit Loop(Started& mpi, std::chrono::milliseconds timeout = std::chrono::seconds(60))
      : comm_(MpiComm::borrow(mpi.self())),
        channel_(std::make_unique<MpiChannel>(*comm_, std::vector<Rank>{0}, timeout,
                                              [this] { inbox_.ring(); })) {}
  MpiChannel& channel() { return *channel_; }
  void end() { channel_.reset(); }
  ByteString next() { return inbox_.next(*channel_, 0); }

 private:
  ChannelInbox inbox_;
  std::unique_ptr<MpiComm> comm_;
  std::unique_ptr<MpiChannel> channel_;
};

ByteString bytes_of(size_t count, int seed) {
  ByteString bytes(count);
  for (size_t i = 0; i < count; ++i) {
    bytes[i] = static_cast<std::byte>((i + static_cast<size_t>(seed)) * 31 >> 3);
  }
  return bytes;
}

}  // namespace

// Around the size of the first part, too.
TEST(messages_of_all_sizes_come_whole_and_in_order) {
  with_mpi(mpi_abi::kThreadMultiple, [](Started& mpi) {
    Loop loop(mpi);
    const size_t sizes[] = {1, 1019, 1020, 1021, 1024, 70'000, 2, 5 << 20, 3};
    for (int round = 0; round < 3; ++round) {
      for (size_t size : sizes) loop.channel().send(0, bytes_of(size, round));
    }
    for (int round = 0; round < 3; ++round) {
      for (size_t size : sizes) CHECK(loop.next() == bytes_of(size, round));
    }
  });
}

TEST(what_was_said_before_the_end_arrives_and_the_end_has_no_trouble) {
  with_mpi(mpi_abi::kThreadMultiple, [](Started& mpi) {
    Loop loop(mpi);
    const ByteString last = bytes_of(4000, 7);
    loop.channel().send(0, last);
    loop.channel().finish(patience());
    CHECK(loop.next() == last);
    CHECK(loop.next().empty());
    CHECK_EQ(loop.channel().trouble_of(0), "");
    loop.channel().send(0, last);  // nobody hears this
  });
}

// It says that it lives: several times the silence that would end it.
TEST(an_idle_connection_lives) {
  with_mpi(mpi_abi::kThreadMultiple, [](Started& mpi) {
    constexpr std::chrono::milliseconds kTimeout{4000};
    Loop loop(mpi, kTimeout);
    poll(nullptr, 0, 2 * static_cast<int>(kTimeout.count()));  // what is tested: nothing is said
    CHECK(!loop.channel().has_message());
    loop.channel().send(0, bytes_of(10, 1));
    CHECK(loop.next() == bytes_of(10, 1));
  });
}

TEST(a_channel_that_is_dropped_leaves_mpi_usable) {
  with_mpi(mpi_abi::kThreadMultiple, [](Started& mpi) {
    Loop first(mpi);
    first.channel().send(0, bytes_of(100, 2));
    CHECK(first.next() == bytes_of(100, 2));
    first.end();
    Loop second(mpi);
    second.channel().send(0, bytes_of(3000, 3));
    CHECK(second.next() == bytes_of(3000, 3));
  });
}

}  // namespace farandole::check
