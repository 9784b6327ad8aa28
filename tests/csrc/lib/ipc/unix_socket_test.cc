// SPDX-License-Identifier: Apache-2.0
#include "lib/ipc/unix_socket.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <thread>

#include "check.h"
#include "folder.h"
#include "lib/ipc/segment.h"

namespace farandole {
namespace {

using namespace std::chrono_literals;

Deadline soon() { return Deadline::in(20ms); }
Deadline patience() { return Deadline::in(30s); }

std::span<const std::byte> text(const char* words) {
  return std::as_bytes(std::span(words, std::strlen(words)));
}

bool same(const UnixMessage& message, const char* words) {
  return std::ranges::equal(message.bytes, text(words));
}

constexpr uid_t kStranger = 65534;

struct Pair {
  explicit Pair(const JobKey& key = random_key())
      : client(UnixSocket::connect(listener.name(), key, patience())),
        server(listener.accept(key, patience())) {}
  UnixListener listener;
  UnixSocket client;
  UnixSocket server;
};

sockaddr_un address_of(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  name.copy(address.sun_path, sizeof(address.sun_path) - 1);
  return address;
}

// A connection that has not shown a key.
Fd connect_silently(const std::string& name) {
  Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  const sockaddr_un address = address_of(name);
  CHECK_EQ(connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  return fd;
}

// Waits until the peer has closed; false if it has not.
bool hung_up(int fd) {
  pollfd event{fd, POLLRDHUP, 0};
  return poll(&event, 1, 10'000) == 1 && (event.revents & (POLLRDHUP | POLLHUP)) != 0;
}

}  // namespace

// The kernel counts descriptors on their way by user: other jobs of the user may have sent them.
TEST(descriptors_beyond_the_users_limit_wait_for_a_reader) {
  check::run_in_fork([] {
    if (geteuid() == 0) CHECK_EQ(setuid(kStranger), 0);  // root may exceed it
    const rlimit limit{64, 64};
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    int ends[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
    UnixSocket sender{Fd(ends[0])};
    UnixSocket receiver{Fd(ends[1])};
    const std::vector<int> fds(33, ends[0]);
    for (int i = 0; i < 2; ++i) sender.send(text("early"), fds, patience());
    const Deadline deadline = soon();
    CHECK_THROWS(sender.send(text("late"), fds, deadline), ErrorCode::kLibrary);
    CHECK(deadline.expired());
    CHECK_EQ(receiver.receive(patience()).fds.size(), 33);
    sender.send(text("late"), fds, patience());
  });
}

TEST(messages_keep_their_boundaries_in_both_directions) {
  Pair pair;
  pair.client.send(text("one"), {}, patience());
  pair.client.send(text("two"), {}, patience());
  pair.server.send(text("back"), {}, patience());
  CHECK(same(pair.server.receive(patience()), "one"));
  CHECK(same(pair.server.receive(patience()), "two"));
  CHECK(same(pair.client.receive(patience()), "back"));
}

TEST(the_longest_message_arrives_whole_and_a_longer_one_is_refused) {
  Pair pair;
  std::vector<std::byte> longest(UnixSocket::kMaxBytes);
  for (size_t i = 0; i < longest.size(); ++i) longest[i] = static_cast<std::byte>(i * 31 >> 3);
  pair.client.send(longest, {}, patience());
  CHECK(pair.server.receive(patience()).bytes == longest);
  longest.push_back(std::byte{0});
  CHECK_THROWS(pair.client.send(longest, {}, patience()), ErrorCode::kInternal);
  CHECK_THROWS(pair.client.send({}, {}, patience()), ErrorCode::kInternal);
}

TEST(descriptors_travel_to_a_forked_process) {
  const JobKey key = random_key();
  UnixListener listener;
  const Segment left = Segment::create("left", 4096);
  const Segment right = Segment::create("right", 8192);
  check::run_in_forks(2, [&](int rank) {
    if (rank == 0) {
      UnixSocket peer = listener.accept(key, patience());
      UnixMessage message = peer.receive(patience());
      CHECK(same(message, "segments"));
      CHECK_EQ(message.fds.size(), 2);
      CHECK((fcntl(message.fds[0].get(), F_GETFD) & FD_CLOEXEC) != 0);
      const Segment first = Segment::map(std::move(message.fds[0]));
      const Segment second = Segment::map(std::move(message.fds[1]));
      CHECK_EQ(first.size(), 4096);
      CHECK_EQ(second.size(), 8192);
      first.data()[17] = std::byte{1};
      second.data()[18] = std::byte{2};
      return;
    }
    UnixSocket peer = UnixSocket::connect(listener.name(), key, patience());
    const int fds[] = {left.fd(), right.fd()};
    peer.send(text("segments"), fds, patience());
    CHECK_THROWS(peer.receive(patience()), ErrorCode::kPeer);  // done when the other has ended
  });
  CHECK(left.data()[17] == std::byte{1});
  CHECK(right.data()[18] == std::byte{2});
}

TEST(as_many_descriptors_as_promised) {
  Pair pair;
  const std::vector<int> most(UnixSocket::kMaxFds, STDERR_FILENO);
  pair.client.send(text("most"), most, patience());
  CHECK_EQ(pair.server.receive(patience()).fds.size(), UnixSocket::kMaxFds);
  const std::vector<int> more(UnixSocket::kMaxFds + 1, STDERR_FILENO);
  CHECK_THROWS(pair.client.send(text("more"), more, patience()), ErrorCode::kInternal);
}

TEST(descriptors_that_find_no_place_are_an_error) {
  check::run_in_fork([] {
    Pair pair;
    const int fds[] = {0, 1, 2};
    pair.client.send(text("three"), fds, patience());
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = static_cast<rlim_t>(Fd(dup(0)).get() + 1);  // one more descriptor at most
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    CHECK_THROWS(pair.server.receive(patience()), ErrorCode::kLibrary);
    CHECK(Fd(dup(0)).get() >= 0);  // the one that did arrive was closed
  });
}

TEST(a_peer_of_another_process_hangs_up_when_it_ends) {
  const JobKey key = random_key();
  UnixListener listener;
  pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    UnixSocket peer = UnixSocket::connect(listener.name(), key, patience());
    _exit(0);
  }
  const UnixSocket peer = listener.accept(key, patience());
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  CHECK(hung_up(peer.fd()));
}

TEST(only_the_right_key_gets_in) {
  const JobKey key = random_key();
  UnixListener listener;
  JobKey almost = key;
  almost.back() ^= std::byte{1};
  UnixSocket wrong = UnixSocket::connect(listener.name(), almost, patience());
  const Fd short_key = connect_silently(listener.name());
  CHECK_EQ(send(short_key.get(), key.data(), key.size() - 1, 0), 15);
  const Fd long_key = connect_silently(listener.name());
  const std::vector<std::byte> longer(100, key.front());
  CHECK_EQ(send(long_key.get(), longer.data(), longer.size(), 0), 100);
  CHECK_THROWS(listener.accept(key, soon()), ErrorCode::kStall);
  CHECK_THROWS(wrong.receive(patience()), ErrorCode::kPeer);
  CHECK(hung_up(short_key.get()));
  CHECK(hung_up(long_key.get()));
}

TEST(more_clients_than_the_backlog_holds_get_in) {
  const JobKey key = random_key();
  UnixListener listener;
  constexpr int kClients = 400;
  std::vector<UnixSocket> clients;
  std::thread connecting([&] {
    for (int i = 0; i < kClients; ++i) {
      clients.push_back(UnixSocket::connect(listener.name(), key, patience()));
    }
  });
  for (int i = 0; i < kClients; ++i) {
    CHECK(listener.accept(key, patience()).fd() >= 0);
  }
  connecting.join();
}

// It sees the names in /proc/net/unix.
TEST(another_user_can_neither_call_nor_take_a_name) {
  if (geteuid() != 0) check::skip("changing the user needs root");
  const UnixListener listener;
  const std::string other = listener.name() + "0";
  check::run_in_fork([&] {
    std::ifstream seen("/proc/net/unix");
    const std::string all{std::istreambuf_iterator<char>(seen), {}};
    CHECK(all.find(listener.name()) != std::string::npos);
    CHECK_EQ(setuid(kStranger), 0);
    const Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    const sockaddr_un there = address_of(listener.name());
    CHECK_EQ(connect(fd.get(), reinterpret_cast<const sockaddr*>(&there), sizeof there), -1);
    CHECK_EQ(errno, EACCES);
    const sockaddr_un free = address_of(other);
    CHECK_EQ(bind(fd.get(), reinterpret_cast<const sockaddr*>(&free), sizeof free), -1);
    CHECK_EQ(errno, EACCES);
  });
}

// One that has a way into the folder, all the same.
TEST(a_process_of_another_user_is_refused) {
  if (geteuid() != 0) check::skip("changing the user needs root");
  const JobKey key = random_key();
  const check::Folder open(0777);
  UnixListener listener;
  const std::string way = open.path("way");
  CHECK_EQ(link(listener.name().c_str(), way.c_str()), 0);
  CHECK_EQ(chmod(way.c_str(), 0777), 0);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    if (setuid(kStranger) != 0) _exit(2);
    const Fd fd = connect_silently(way);
    const bool refused = send(fd.get(), key.data(), key.size(), MSG_NOSIGNAL) < 0;  // already?
    if (refused && errno != EPIPE) _exit(3);
    try {
      UnixSocket::connect(way, key, patience());
    } catch (const Error& error) {  // the client, too, looks who listens
      _exit(error.code() == ErrorCode::kPeer && hung_up(fd.get()) ? 0 : 4);
    }
    _exit(5);
  }
  int status = 0;
  while (waitpid(child, &status, WNOHANG) == 0) {
    CHECK_THROWS(listener.accept(key, soon()), ErrorCode::kStall);
  }
  CHECK_EQ(WEXITSTATUS(status), 0);
}

TEST(every_call_ends_at_its_deadline) {
  Pair pair;
  const int64_t start = now_ns();
  CHECK_THROWS(pair.server.receive(soon()), ErrorCode::kStall);
  CHECK(now_ns() - start >= 20'000'000);
  CHECK_THROWS(pair.listener.accept(random_key(), soon()), ErrorCode::kStall);
  const std::vector<std::byte> block(UnixSocket::kMaxBytes);
  const auto fill = [&] {
    for (;;) pair.client.send(block, {}, soon());
  };
  CHECK_THROWS(fill(), ErrorCode::kStall);
  UnixListener busy;
  std::vector<UnixSocket> waiting;
  const auto fill_backlog = [&] {
    for (;;) waiting.push_back(UnixSocket::connect(busy.name(), random_key(), soon()));
  };
  CHECK_THROWS(fill_backlog(), ErrorCode::kStall);
}

TEST(a_peer_that_is_gone_is_an_error) {
  Pair pair;
  pair.server = UnixSocket(Fd());
  CHECK_THROWS(pair.client.receive(patience()), ErrorCode::kPeer);
  CHECK_THROWS(pair.client.send(text("anybody?"), {}, patience()), ErrorCode::kPeer);
  CHECK_THROWS(UnixSocket::connect("/nowhere/nobody", random_key(), patience()), ErrorCode::kPeer);
}

TEST(a_forked_child_does_not_remove_its_parent_s_socket) {
  std::optional<UnixListener> listener(std::in_place);
  const std::string name = listener->name();
  check::run_in_fork([&] { listener.reset(); });
  CHECK(std::filesystem::exists(name));
  listener.reset();
  CHECK(!std::filesystem::exists(name));
}

TEST(keys_and_names_are_random) {
  std::set<JobKey> keys;
  std::set<std::string> names;
  for (int i = 0; i < 100; ++i) {
    keys.insert(random_key());
    names.insert(UnixListener().name());
  }
  CHECK_EQ(keys.size(), 100);
  for (const std::string& name : names) {
    CHECK_EQ(name.find_last_not_of("0123456789abcdef"), name.size() - 1 - 2 * sizeof(JobKey));
  }
  CHECK_EQ(names.size(), 100);
}

}  // namespace farandole
