// SPDX-License-Identifier: Apache-2.0
// The wire by TCP, on real sockets: under the backend, and alone with peers that are slow, wrong or gone.
#include "data/hierarchical/tcp_wire.h"

#include <sys/socket.h>

#include <memory>
#include <string>
#include <vector>

#include "control/bootstrap/local_bootstrap.h"
#include "data/hierarchical/hierarchical_world.h"
#include "lib/ipc/unix_socket.h"

namespace farandole::check {
namespace {

using Ends = std::vector<std::shared_ptr<TcpEnds>>;
using Channel = Wire::Channel;
using Bytes = std::vector<std::byte>;

Ends ends_of(size_t ranks, std::chrono::milliseconds timeout = std::chrono::seconds(30)) {
  const Key128 key = random_key();
  Ends ends;
  for (size_t rank = 0; rank < ranks; ++rank) {
    ends.push_back(std::make_shared<TcpEnds>());
    ends.back()->rank = static_cast<Rank>(rank);
    ends.back()->key = key;
    ends.back()->timeout = timeout;
  }
  for (const auto& mine : ends) {
    for (const auto& one : ends) {
      mine->addresses.push_back({{"127.0.0.1"}, one->listener.address().port});
      mine->host_names.push_back("host" + std::to_string(one->rank));
    }
  }
  return ends;
}

std::unique_ptr<TcpWire> wire_of(const Ends& ends, size_t rank, uint64_t number = 5) {
  return std::make_unique<TcpWire>(ends[rank], numbers_below(static_cast<int>(ends.size())),
                                   number);
}

Bytes pattern(size_t bytes, size_t seed) {
  Bytes data(bytes);
  for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<std::byte>((i + seed) * 131 >> 4);
  return data;
}

// Both ends move until this holds.
template <class Condition>
void move_until(Wire& one, Wire& other, Condition&& holds) {
  const Deadline deadline = patience();
  while (!holds()) {
    one.move();
    other.move();
    if (deadline.expired()) fail("the messages never came");
  }
}

// The text of the PeerError that asking for the message ends in.
std::string fault_of(Wire& wire, Wire::Ticket ticket) {
  const Deadline deadline = patience();
  try {
    while (!deadline.expired()) {
      wire.move();
      CHECK(!wire.done(ticket));
    }
  } catch (const Error& error) {
    CHECK_EQ(error.code(), ErrorCode::kPeer);
    return error.what();
  }
  fail("the fault was never told");
}

// Members of several sets in a row.
BackendWorld world_of(const std::vector<int>& host, const Shape& shape) {
  const Ends ends = ends_of(host.size());
  const auto wire = [ends](int member) { return wire_of(ends, static_cast<size_t>(member)); };
  return hierarchical_world(host, shape, wire);
}

}  // namespace

TEST(carries_random_buckets_between_threads) {
  for (size_t layout : {1, 4, 8, 9}) {
    with_seed(300 + layout, [layout](uint64_t seed) {
      Random random(seed);
      const std::vector<int>& host = kHosts[layout];
      run_threads(world_of(host, kShapes[seed % std::size(kShapes)]),
                  random_buckets(random, host, 60, 6, 500));
    });
  }
}

// Of any size, in order on each channel; those of other channels and sets do not mix with them.
TEST(messages_come_in_order_whatever_was_sent_first) {
  const Ends ends = ends_of(2);
  const auto mine = wire_of(ends, 0), theirs = wire_of(ends, 1);
  const auto mine_too = wire_of(ends, 0, 6), theirs_too = wire_of(ends, 1, 6);
  struct Letter {
    Bytes sent, got;
    Wire::Ticket out, in;
  };
  std::vector<Letter> letters;
  for (size_t i = 0; i < 40; ++i) {
    const size_t bytes = i % 5 == 0 ? 0 : i * i * i * 7;
    letters.push_back({pattern(bytes, i), Bytes(bytes), 0, 0});
  }
  const auto from = [&](size_t i) -> Wire& { return i % 4 < 2 ? *mine : *mine_too; };
  const auto to = [&](size_t i) -> Wire& { return i % 4 < 2 ? *theirs : *theirs_too; };
  const auto channel = [](size_t i) { return i % 2 ? Channel::kResult : Channel::kPartial; };
  for (size_t i = 0; i < letters.size(); ++i) {
    letters[i].out = from(i).send(1, channel(i), letters[i].sent.data(), letters[i].sent.size());
  }
  for (size_t j = 0; j < letters.size(); ++j) {  // the other set's first
    const size_t i = j ^ 2;
    letters[i].in = to(i).receive(0, channel(i), letters[i].got.data(), letters[i].got.size());
  }
  for (size_t i = 0; i < letters.size(); ++i) {
    move_until(from(i), to(i), [&] { return to(i).done(letters[i].in); });
    CHECK(from(i).done(letters[i].out));
    CHECK(letters[i].got == letters[i].sent);
  }
}

TEST(a_slow_reader_holds_the_sender_back_and_nothing_is_lost) {
  const Ends ends = ends_of(2, std::chrono::milliseconds(100));  // it may take longer to read
  const auto sender = wire_of(ends, 0), reader = wire_of(ends, 1);
  const Bytes sent = pattern(64 << 20, 3);  // more than the kernel keeps
  Bytes got(sent.size());
  const auto both = [&](size_t bytes) {
    const Wire::Ticket out = sender->send(1, Channel::kResult, sent.data(), bytes);
    const Wire::Ticket in = reader->receive(0, Channel::kResult, got.data(), bytes);
    move_until(*sender, *reader, [&] { return reader->done(in) && sender->done(out); });
  };
  both(10);  // all connections are open then
  both(20);
  const Wire::Ticket large = sender->send(1, Channel::kResult, sent.data(), sent.size());
  const Wire::Ticket small = sender->send(1, Channel::kResult, sent.data(), 30);
  for (const Deadline later = Deadline::in(std::chrono::milliseconds(500)); !later.expired();) {
    sender->move();
    reader->move();
  }
  CHECK(!sender->done(large));  // nobody has asked for it
  CHECK(sender->done(small));   // it is on the other connection
  const Wire::Ticket in = reader->receive(0, Channel::kResult, got.data(), got.size());
  move_until(*sender, *reader, [&] { return reader->done(in); });
  CHECK(sender->done(large));
  CHECK(got == sent);
}

TEST(a_peer_that_is_gone_is_named) {
  const Ends ends = ends_of(3);
  const auto mine = wire_of(ends, 0);
  auto theirs = wire_of(ends, 2);
  std::byte sent{7}, got{};
  const Wire::Ticket in = mine->receive(2, Channel::kPartial, &got, 1);
  theirs->send(0, Channel::kPartial, &sent, 1);
  move_until(*theirs, *mine, [&] { return mine->done(in); });
  mine->receive(2, Channel::kPartial, &got, 1);  // on the other connection
  const Wire::Ticket never = mine->receive(2, Channel::kPartial, &got, 1);
  theirs.reset();
  const std::string text = fault_of(*mine, never);
  CHECK(contains(text, "rank 2 on host2") && contains(text, "network"));
}

TEST(a_sender_hears_of_a_peer_that_is_gone) {
  const Ends ends = ends_of(2);
  const auto mine = wire_of(ends, 0);
  auto theirs = wire_of(ends, 1);
  const Bytes sent = pattern(64 << 20, 1);
  Bytes got(1000);
  const Wire::Ticket out = mine->send(1, Channel::kResult, sent.data(), sent.size());
  const Wire::Ticket in = theirs->receive(0, Channel::kResult, got.data(), got.size());
  move_until(*mine, *theirs, [&] { return theirs->done(in); });
  theirs.reset();
  CHECK(contains(fault_of(*mine, out), "rank 1 on host1"));
}

// A peer whose words end in the middle of a message, though it listens still.
TEST(a_connection_closed_by_half_is_an_error) {
  const Ends ends = ends_of(2);
  const auto mine = wire_of(ends, 0, 0);
  Bytes got(100);
  const Wire::Ticket in = mine->receive(1, Channel::kPartial, got.data(), got.size());
  TcpCaller caller(1, 0, 1, ends[1]->addresses[0], ends[1]->key);  // the first line of wire 0
  while (!caller.step()) mine->move();
  CHECK_EQ(::send(caller.fd().get(), got.data(), 50, MSG_NOSIGNAL), 50);
  CHECK_EQ(shutdown(caller.fd().get(), SHUT_WR), 0);
  CHECK(contains(fault_of(*mine, in), "rank 1 on host1"));
}

TEST(a_wrong_key_gets_nowhere) {
  const Ends ends = ends_of(2, std::chrono::milliseconds(200));
  ends[1]->key = random_key();
  const auto mine = wire_of(ends, 0), theirs = wire_of(ends, 1);
  std::byte sent{7}, got{};
  const Wire::Ticket in = mine->receive(1, Channel::kPartial, &got, 1);
  const Wire::Ticket out = theirs->send(0, Channel::kPartial, &sent, 1);
  std::string text;
  move_until(*mine, *theirs, [&] {
    try {
      CHECK(!mine->done(in) && !theirs->done(out));
    } catch (const Error& error) {
      CHECK_EQ(error.code(), ErrorCode::kPeer);
      text = error.what();
    }
    return !text.empty();
  });
  CHECK(contains(text, "rank 0 on host0") && contains(text, "did not prove"));
  CHECK(got == std::byte{0});
}

TEST(a_rank_where_nobody_listens_is_named) {
  const Ends ends = ends_of(2, std::chrono::milliseconds(200));
  {
    const TcpListener closed;
    ends[0]->addresses[1].port = closed.address().port;
  }
  const auto mine = wire_of(ends, 0);
  std::byte sent{7};
  const std::string text = fault_of(*mine, mine->send(1, Channel::kPartial, &sent, 1));
  CHECK(contains(text, "rank 1 on host1") && contains(text, "Connection refused"));
}

}  // namespace farandole::check
