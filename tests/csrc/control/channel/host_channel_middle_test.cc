// SPDX-License-Identifier: Apache-2.0
// Somebody between two hosts who relays all that they send: as long as nothing is altered nobody notices, and nothing
// else is gained by it.
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "control/bootstrap/local_bootstrap.h"
#include "control/channel/channel_end.h"
#include "lib/ipc/unix_socket.h"
#include "lib/net/trap.h"

namespace farandole::check {
namespace {

constexpr Rank kRoot = 0, kLeaf = 7;
// What the handshake's messages are long, from the caller and from the listener in turns.
constexpr std::array<size_t, 4> kHandshake = {36, 32, 16, 1};

// Rank 0 and rank 7, and what is between them.
struct Relayed {
  std::unique_ptr<End> root, leaf;
  Fd to_root, to_leaf;
  std::array<ByteString, 4> handshake;

  ByteString from_leaf() const { return frame_from(to_leaf); }
  ByteString from_root() const { return frame_from(to_root); }
  void hang_up() {
    to_root.reset();
    to_leaf.reset();
  }

 private:
  static ByteString frame_from(const Fd& fd) {
    ByteString frame = receive(fd, 32);  // the head and its MAC
    uint64_t bytes = 0;
    std::memcpy(&bytes, frame.data(), sizeof bytes);
    const ByteString rest = receive(fd, bytes + sizeof(Mac128));
    frame.insert(frame.end(), rest.begin(), rest.end());
    return frame;
  }
};

Relayed relay(const Key128& key) {
  TcpListener listener;
  const Trap trap;
  Relayed middle;
  const auto end_of = [](TcpPeer peer) {
    std::vector<TcpPeer> peers;
    peers.push_back(std::move(peer));
    return std::make_unique<End>(std::move(peers));
  };
  std::thread leaf(
      [&] { middle.leaf = end_of(tcp_connect(kLeaf, kRoot, trap.address(), key, patience())); });
  std::thread root([&] {
    middle.root = end_of(std::move(listener.accept(kRoot, {kLeaf}, key, patience()).front()));
  });
  middle.to_leaf = trap.catch_one();
  middle.to_root = call(listener.address());
  for (size_t i = 0; i < kHandshake.size(); ++i) {
    const bool by_caller = i % 2 == 0;
    middle.handshake[i] = receive(by_caller ? middle.to_leaf : middle.to_root, kHandshake[i]);
    give(by_caller ? middle.to_root : middle.to_leaf, middle.handshake[i]);
  }
  leaf.join();
  root.join();
  return middle;
}

// The root notices, takes nothing more from this connection, and says why.
void check_noticed(Relayed& middle) {
  const std::string how = middle.root->end(kLeaf);
  if (how.find("changed, repeated or dropped") == std::string::npos) fail(how);
}

ByteString flipped(ByteString bytes, size_t at, int bit = 0) {
  bytes.at(at) ^= std::byte{1} << bit;
  return bytes;
}

}  // namespace

TEST(what_is_relayed_unchanged_comes) {
  Relayed middle = relay(random_key());
  for (int i = 0; i < 3; ++i) {
    const ByteString up = bytes_of("report " + std::to_string(i));
    middle.leaf->channel().send(kRoot, up);
    give(middle.to_root, middle.from_leaf());
    CHECK(middle.root->next(kLeaf) == up);
    const ByteString down = bytes_of("log " + std::to_string(i));
    middle.root->channel().send(kLeaf, down);
    give(middle.to_leaf, middle.from_root());
    CHECK(middle.leaf->next(kRoot) == down);
  }
}

// Its length, its number, its text and both MACs: at once, though no further byte comes.
TEST(a_changed_frame_is_noticed_wherever_it_was_changed) {
  const ByteString message = bytes_of("report");
  for (size_t at : {0, 4, 7, 8, 15, 16, 31, 32, 37, 38, 46, 53}) {
    Relayed middle = relay(random_key());
    middle.leaf->channel().send(kRoot, message);
    const ByteString frame = middle.from_leaf();
    CHECK_EQ(frame.size(), size_t{54});
    give(middle.to_root, flipped(frame, at, static_cast<int>(at % 8)));
    check_noticed(middle);
  }
}

// The head alone comes, with a length that somebody has changed.
TEST(a_changed_length_is_noticed_before_its_bytes_come) {
  for (int bit = 0; bit < 64; ++bit) {
    Relayed middle = relay(random_key());
    middle.leaf->channel().send(kRoot, bytes_of("report"));
    ByteString head = flipped(middle.from_leaf(), static_cast<size_t>(bit / 8), bit % 8);
    head.resize(32);
    give(middle.to_root, head);
    check_noticed(middle);
  }
}

TEST(a_frame_out_of_its_place_is_noticed) {
  const auto noticed = [](auto&& tamper) {
    Relayed middle = relay(random_key());
    for (const char* text : {"report", "second"})
      middle.leaf->channel().send(kRoot, bytes_of(text));
    tamper(middle);
    check_noticed(middle);
  };
  noticed([](Relayed& middle) {  // repeated
    const ByteString frame = middle.from_leaf();
    for (int i = 0; i < 2; ++i) give(middle.to_root, frame);
    CHECK(middle.root->next(kLeaf) == bytes_of("report"));
  });
  noticed([](Relayed& middle) {  // in another order
    const ByteString first = middle.from_leaf();
    give(middle.to_root, middle.from_leaf());
    give(middle.to_root, first);
  });
  noticed([](Relayed& middle) {  // the first left out
    middle.from_leaf();
    give(middle.to_root, middle.from_leaf());
  });
  noticed([](Relayed& middle) {  // of the other direction, with the number that the reader expects
    middle.root->channel().send(kLeaf, bytes_of("log"));
    give(middle.to_root, middle.from_root());
  });
}

TEST(a_frame_of_another_connection_is_noticed) {
  const Key128 key = random_key();
  Relayed before = relay(key);
  before.leaf->channel().send(kRoot, bytes_of("report"));
  const ByteString frame = before.from_leaf();
  Relayed middle = relay(key);
  give(middle.to_root, frame);
  check_noticed(middle);
}

TEST(a_caller_that_repeats_an_old_handshake_gets_nowhere) {
  const Key128 key = random_key();
  const Relayed before = relay(key);
  TcpListener listener;
  std::thread replay([&] {
    const Fd fd = call(listener.address());
    give(fd, before.handshake[0]);
    receive(fd, kHandshake[1]);
    give(fd, before.handshake[2]);
    CHECK(closed(fd));  // no welcome
  });
  CHECK_THROWS(listener.accept(kRoot, {kLeaf}, key, Deadline::in(std::chrono::seconds(1))),
               ErrorCode::kPeer);
  replay.join();
}

TEST(a_listener_that_repeats_an_old_handshake_gets_nowhere) {
  const Key128 key = random_key();
  const Relayed before = relay(key);
  const Trap trap;
  std::thread replay([&] {
    const Fd fd = trap.catch_one();
    receive(fd, kHandshake[0]);
    give(fd, before.handshake[1]);
    give(fd, before.handshake[3]);
    CHECK(closed(fd));  // no proof
  });
  TcpCaller caller(kLeaf, kRoot, kControlLine, trap.address(), key);
  const Deadline deadline = patience();
  while (caller.trouble().find("did not prove") == std::string::npos) {
    CHECK(!caller.step() && !deadline.expired());
    caller.wait(deadline);
  }
  replay.join();
}

// Its own hello, answered by itself: what the caller proves is not what a listener proves.
TEST(a_caller_is_not_its_own_listener) {
  const Key128 key = random_key();
  const Trap trap;
  TcpListener listener;  // of the caller, whose answer is reflected
  std::thread reflect([&] {
    const Fd caller = trap.catch_one(), own = call(listener.address());
    give(own, receive(caller, kHandshake[0]));
    give(caller, receive(own, kHandshake[1]));
    CHECK(closed(caller));
  });
  TcpCaller caller(kLeaf, kRoot, kControlLine, trap.address(), key);
  const Deadline deadline = patience();
  while (caller.trouble().find("did not prove") == std::string::npos) {
    CHECK(!caller.step() && !deadline.expired());
    CHECK(!listener.take(kLeaf, kLeaf, kControlLine, key));
  }
  reflect.join();
}

// A control connection that reaches the listener as a connection for data.
TEST(a_middle_that_changes_the_line_gets_nowhere) {
  const Key128 key = random_key();
  const Trap trap;
  TcpListener listener;
  std::thread middle([&] {
    const Fd caller = trap.catch_one(), own = call(listener.address());
    ByteString hello = receive(caller, kHandshake[0]);
    hello[8 + 4] ^= std::byte{1};  // after the magic and the rank
    give(own, hello);
    give(caller, receive(own, kHandshake[1]));
    CHECK(closed(caller));
  });
  TcpCaller caller(kLeaf, kRoot, kControlLine, trap.address(), key);
  const Deadline deadline = patience();
  while (caller.trouble().find("did not prove") == std::string::npos) {
    CHECK(!caller.step() && !deadline.expired());
    CHECK(!listener.take(kRoot, kLeaf, kControlLine, key));
  }
  middle.join();
}

TEST(a_caller_of_another_version_gets_no_answer) {
  const Key128 key = random_key();
  ByteString hello = relay(key).handshake[0];
  hello[6] ^= std::byte{1};  // the version in the magic
  TcpListener listener;
  std::atomic<bool> over{false};
  std::thread caller([&] {
    const Fd fd = call(listener.address());
    give(fd, hello);
    CHECK(closed(fd));
    over = true;
  });
  while (!over) CHECK(!listener.take(kRoot, kLeaf, kControlLine, key));
  caller.join();
}

TEST(a_middle_that_hangs_up_ends_the_connection_for_both) {
  Relayed middle = relay(random_key());
  middle.leaf->channel().send(kRoot, bytes_of("never arrives"));
  middle.from_leaf();
  middle.hang_up();
  CHECK(middle.root->end(kLeaf).starts_with("has ended"));
  CHECK(middle.leaf->end(kRoot).starts_with("has ended"));
}

}  // namespace farandole::check
