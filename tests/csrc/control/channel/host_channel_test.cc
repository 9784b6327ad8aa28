// SPDX-License-Identifier: Apache-2.0
// The channel between hosts, and everybody else who knocks at its door.
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <functional>
#include <map>
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

struct Pair {
  std::unique_ptr<End> root, leaf;
};

// Rank 0 and rank 7, after `intrude` has tried what it can at the listener.
Pair connect(const std::function<void(const TcpAddress&)>& intrude = {}) {
  TcpListener listener;
  const Key128 key = random_key();
  if (intrude) intrude(listener.address());
  Pair pair;
  std::thread leaf([&] {
    std::vector<TcpPeer> peers;
    peers.push_back(tcp_connect(7, 0, listener.address(), key, patience()));
    pair.leaf = std::make_unique<End>(std::move(peers));
  });
  std::vector<TcpPeer> peers = listener.accept(0, {7}, key, patience());
  CHECK_EQ(peers.size(), size_t{1});
  pair.root = std::make_unique<End>(std::move(peers));
  leaf.join();
  return pair;
}

void check_talk(Pair& pair) {
  pair.root->channel().send(7, bytes_of("log"));
  pair.leaf->channel().send(0, bytes_of("report"));
  CHECK(pair.leaf->next(0) == bytes_of("log"));
  CHECK(pair.root->next(7) == bytes_of("report"));
}

}  // namespace

TEST(messages_of_all_sizes_come_whole_and_in_order) {
  Pair pair = connect();
  ByteString big(5 << 20);
  for (size_t i = 0; i < big.size(); ++i) big[i] = static_cast<std::byte>(i * 31 >> 3);
  for (int round = 0; round < 3; ++round) {
    pair.root->channel().send(7, big);
    pair.root->channel().send(7, bytes_of("after"));
    pair.leaf->channel().send(0, big);
  }
  const auto hear = [&](End& end, Rank from, std::initializer_list<ByteString> messages) {
    for (int round = 0; round < 3; ++round) {
      for (const ByteString& message : messages) CHECK(end.next(from) == message);
    }
    end.channel().finish(patience());
  };
  // Each end sends the rest of its messages while it waits.
  std::thread leaf([&] { hear(*pair.leaf, 0, {big, bytes_of("after")}); });
  hear(*pair.root, 7, {big});
  leaf.join();
}

// Else the driver would never sleep.
TEST(without_news_nothing_has_changed) {
  Pair pair = connect();
  check_talk(pair);
  const Deadline deadline = patience();
  for (End* end : {pair.root.get(), pair.leaf.get()}) {
    while (end->work()) CHECK(!deadline.expired());
  }
}

TEST(messages_before_an_end_arrive_and_the_end_is_noticed) {
  Pair pair = connect();
  pair.root->channel().send(7, bytes_of("last word"));
  std::thread finish([&] {
    pair.root->channel().finish(patience());
    pair.root.reset();
  });
  CHECK(pair.leaf->next(0) == bytes_of("last word"));
  CHECK(pair.leaf->end(0).starts_with("has ended"));
  pair.leaf->channel().send(0, bytes_of("nobody hears this"));
  pair.leaf->channel().finish(patience());
  finish.join();
}

TEST(strangers_change_nothing) {
  std::vector<Fd> kept;
  Pair pair = connect([&](const TcpAddress& address) {
    kept.push_back(call(address));  // a half-open connection
    Fd scan = call(address);        // a port scan
    Fd web = call(address);
    const char request[] = "GET / HTTP/1.1\r\nHost: example\r\n\r\n";
    CHECK(::send(web.get(), request, sizeof request, MSG_NOSIGNAL) > 0);
    kept.push_back(std::move(web));
    Fd hasty = call(address);  // begins well, and says no more
    CHECK(::send(hasty.get(), "farand3\n", 8, MSG_NOSIGNAL) > 0);
    kept.push_back(std::move(hasty));
  });
  check_talk(pair);
}

// Hundreds, who come before and after the peer: the listener keeps no more than its bound, and each for its time only.
TEST(hundreds_of_silent_strangers_are_bounded_in_number_and_time) {
  constexpr size_t kCrowd = 600;
  TcpListener listener;
  const Key128 key = random_key();
  std::vector<Fd> kept;
  const auto come = [&](size_t strangers) {
    for (size_t i = 0; i < strangers; ++i) {
      kept.push_back(call(listener.address()));
      if (i % 3 != 0) continue;  // a third begin well, and say no more
      CHECK(::send(kept.back().get(), "farand3\n", 8, MSG_NOSIGNAL) > 0);
    }
  };
  const auto alive = [&kept] {
    return static_cast<size_t>(std::ranges::count_if(kept, [](const Fd& fd) {
      std::byte one;
      return recv(fd.get(), &one, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN;
    }));
  };
  come(kCrowd);
  const int64_t began = now_ns();
  std::thread leaf([&] { tcp_connect(7, 0, listener.address(), key, patience()); });
  CHECK_EQ(listener.accept(0, {7}, key, patience()).size(), size_t{1});
  leaf.join();
  CHECK(now_ns() - began < 4'000'000'000);           // they cost the peer no time limit of theirs
  CHECK(alive() <= TcpListener::kMaxStrangers + 1);  // and a place for the peer
  come(kCrowd / 4);
  CHECK(!listener.take(0, 7, 1, key));
  CHECK(alive() >
        kCrowd / 8);  // a flood does not hold this thread: it takes some of them at a time
  while (alive() > TcpListener::kMaxStrangers) CHECK(!listener.take(0, 7, 1, key));
  CHECK_THROWS(listener.accept(0, {8}, key, Deadline::in(std::chrono::seconds(6))),
               ErrorCode::kPeer);
  CHECK_EQ(alive(), size_t{0});
}

// One that is far away: its proof takes longer than strangers need to come.
TEST(who_has_said_its_hello_does_not_go_for_the_silent) {
  TcpListener listener;
  const Key128 key = random_key();
  TcpCaller caller(7, 0, kControlLine, listener.address(), key);
  caller.step();  // sends its hello: loopback connects at once
  CHECK(!listener.take(0, 7, kControlLine, key));
  std::vector<Fd> crowd;
  for (size_t i = 0; i < 3 * TcpListener::kMaxStrangers; ++i)
    crowd.push_back(call(listener.address()));
  std::byte one;
  while (recv(crowd.front().get(), &one, 1, MSG_DONTWAIT) != 0) {  // the first of them has to go
    CHECK(!listener.take(0, 7, kControlLine, key));
  }
  std::thread root([&] { CHECK_EQ(listener.accept(0, {7}, key, patience()).size(), size_t{1}); });
  while (!caller.step()) caller.wait(patience());
  root.join();
  CHECK(caller.trouble().ends_with("; "));  // nothing was tried in vain
}

// A caller that gave up between its proof and the welcome has called again: its first connection is of no use.
TEST(who_has_hung_up_since_its_proof_is_not_taken) {
  constexpr TcpLine kLine = 1;
  TcpListener listener;
  const Key128 key = random_key();
  TcpCaller again(7, 0, kLine, listener.address(), key);
  {
    TcpCaller caller(7, 0, kLine, listener.address(), key);
    caller.step();  // sends its hello: loopback connects at once
    CHECK(!listener.take(0, 7, kLine, key));
    caller.step();  // sends its proof
  }
  CHECK(!listener.take(0, 7, kLine, key));
  Fd taken;
  while (!again.step()) {
    if (!taken) taken = listener.take(0, 7, kLine, key);
  }
  while (!taken) taken = listener.take(0, 7, kLine, key);
  std::byte one{1};
  CHECK_EQ(::send(again.fd().get(), &one, 1, MSG_NOSIGNAL), 1);
  pollfd event{taken.get(), POLLIN, 0};
  CHECK_EQ(poll(&event, 1, patience().poll_ms()), 1);
  CHECK_EQ(recv(taken.get(), &one, 1, MSG_DONTWAIT), 1);
}

// More honest callers than strangers are allowed, all of them unproved at once: none is dropped.
TEST(honest_callers_take_no_place_of_one_another) {
  constexpr Rank kCallers = 150;
  TcpListener listener;
  const Key128 key = random_key();
  std::vector<TcpCaller> callers;
  std::vector<Rank> ranks;
  for (Rank rank = 1; rank <= kCallers; ++rank) {
    ranks.push_back(rank);
    callers.emplace_back(rank, 0, kControlLine, listener.address(), key);
    callers.back().step();  // sends its hello: loopback connects at once
  }
  size_t accepted = 0;
  std::thread root([&] { accepted = listener.accept(0, ranks, key, patience()).size(); });
  for (TcpCaller& caller : callers) {
    while (!caller.step()) caller.wait(patience());
    CHECK(caller.trouble().ends_with("; "));  // nothing was tried in vain
  }
  root.join();
  CHECK_EQ(accepted, ranks.size());
}

// Silent callers take every descriptor that the process has left: the peer comes in nevertheless.
TEST(strangers_may_take_every_descriptor) {
  TcpListener listener;
  const Key128 key = random_key();
  run_in_fork([&] {
    std::vector<Fd> crowd;
    for (size_t i = 0; i < TcpListener::kMaxStrangers; ++i) {
      crowd.push_back(call(listener.address()));
    }
    TcpCaller caller(7, 0, kControlLine, listener.address(), key);
    caller.step();
    const auto most = static_cast<rlim_t>(Fd(dup(0)).get() + 3);  // three are left
    const rlimit few{most, most};
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
    std::thread root([&] { CHECK_EQ(listener.accept(0, {7}, key, patience()).size(), size_t{1}); });
    while (!caller.step()) caller.wait(Deadline::in(std::chrono::milliseconds(50)));
    root.join();
  });
}

TEST(a_wrong_key_or_a_wrong_rank_gets_nowhere) {
  TcpListener listener;
  const Key128 key = random_key();
  std::thread intruders([&] {
    const Deadline soon = Deadline::in(std::chrono::milliseconds(300));
    for (auto& [rank, wrong] : std::map<Rank, Key128>{{7, random_key()}, {9, key}}) {
      CHECK_THROWS(tcp_connect(rank, rank == 9 ? 3 : 0, listener.address(), wrong, soon),
                   ErrorCode::kPeer);
    }
  });
  const std::string text = CHECK_THROWS(
      listener.accept(0, {7}, key, Deadline::in(std::chrono::seconds(1))), ErrorCode::kPeer);
  CHECK(contains(text, "rank 7"));
  intruders.join();
}

// One end of a connection that a test writes by hand.
TEST(who_hangs_up_on_a_caller_is_not_waited_for) {
  const Trap trap;
  TcpCaller caller(1, 0, kControlLine, trap.address(), Key128{});
  CHECK(!caller.step());
  Fd other = trap.catch_one();
  std::byte hello;
  while (recv(other.get(), &hello, 1, MSG_PEEK | MSG_DONTWAIT) < 0) CHECK(!caller.step());
  receive(other, 36);     // else closing resets the connection
  CHECK(!caller.step());  // no answer has come yet
  other.reset();
  const std::string nothing = caller.trouble();
  while (caller.trouble() == nothing) {
    caller.wait(Deadline::in(std::chrono::seconds(30)));
    CHECK(!caller.step());
  }
  CHECK(contains(caller.trouble(), "127.0.0.1: did not prove to be that rank"));
}

TEST(garbage_on_a_link_ends_that_link_only) {
  int ends[2];
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
  int good[2];
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, good), 0);
  Fd mad(ends[1]), friendly(good[1]);
  std::vector<TcpPeer> peers;
  peers.push_back({1, Fd(ends[0])});
  peers.push_back({2, Fd(good[0])});
  End end(std::move(peers));
  const std::string huge = "\xff\xff\xff\xff, they said, and said again and again";
  CHECK(::send(mad.get(), huge.data(), huge.size(), MSG_NOSIGNAL) > 0);
  CHECK(end.end(1).starts_with("is lost"));
  const ByteString hello = FrameWriter(TcpSession().receives).frame(bytes_of("ok"));
  CHECK_EQ(::send(friendly.get(), hello.data(), hello.size(), MSG_NOSIGNAL), hello.size());
  CHECK(end.next(2) == bytes_of("ok"));
}

TEST(proofs_are_those_of_siphash) {
  Key128 key;
  std::vector<std::byte> message;
  for (size_t i = 0; i < 16; ++i) key[i] = static_cast<std::byte>(i);
  auto hex = [&] {
    std::string text;
    for (std::byte b : siphash128(key, message)) {
      char two[3];
      std::snprintf(two, sizeof two, "%02x", static_cast<unsigned>(b));
      text += two;
    }
    return text;
  };
  CHECK_EQ(hex(), "a3817f04ba25a8e66df67214c7550293");  // of the paper's authors
  for (int i = 0; i < 15; ++i) message.push_back(static_cast<std::byte>(i));
  CHECK_EQ(hex(), "5493e99933b0a8117e08ec0f97cfc3d9");
}

}  // namespace farandole::check
