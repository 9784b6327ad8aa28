// SPDX-License-Identifier: Apache-2.0
#include "lib/net/tcp_socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <span>
#include <utility>

#include "base/error.h"
#include "base/types.h"
#include "lib/ipc/unix_socket.h"
#include "lib/net/interfaces.h"

namespace farandole {
namespace {

constexpr std::chrono::seconds kConnectPatience{2};  // per address
constexpr std::chrono::seconds kProofPatience{10};   // the listener may be busy
constexpr std::chrono::milliseconds kPause{50};      // before the caller tries all addresses again
constexpr int kTcpBacklog = 1024;

// hello:   magic, the caller's rank, the line, the caller's nonce    caller -> listener
// answer:  the listener's nonce and proof                           listener -> caller
// proof:   the caller's proof                                       caller -> listener
// welcome: one byte: the listener keeps the connection              listener -> caller
constexpr char kMagic[8] = {'f', 'a', 'r', 'a', 'n', 'd', '3', '\n'};
constexpr size_t kHello = 8 + 4 + 8 + 16;
constexpr size_t kAnswer = 16 + 16;
constexpr size_t kProof = 16;
constexpr std::byte kWelcome{'w'};

void append(std::vector<std::byte>& out, const void* data, size_t size) {
  auto* bytes = static_cast<const std::byte*>(data);
  out.insert(out.end(), bytes, bytes + size);
}

// A proof is a hash of its purpose, both ranks, the line and both nonces, so nobody can replay or reflect a proof. The
// keys of the session are hashes of the same data, but with other purposes.
struct Handshake {
  int32_t caller, listener;
  TcpLine line;
  const std::byte* caller_nonce;
  const std::byte* listener_nonce;

  Mac128 hash_of(char purpose, const Key128& key) const {
    std::vector<std::byte> text;
    append(text, &purpose, 1);
    append(text, &caller, sizeof caller);
    append(text, &listener, sizeof listener);
    append(text, &line, sizeof line);
    append(text, caller_nonce, 16);
    append(text, listener_nonce, 16);
    return siphash128(key, text);
  }
  std::vector<std::byte> proof_of(char speaker, const Key128& key) const {
    const Mac128 mac = hash_of(speaker, key);
    return {mac.begin(), mac.end()};
  }
  TcpSession of_caller(const Key128& key) const { return {hash_of('c', key), hash_of('l', key)}; }
  TcpSession of_listener(const Key128& key) const { return {hash_of('l', key), hash_of('c', key)}; }
};

void prepare(int fd) {
  int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
}

// Receives available bytes until `got` holds `size` bytes. Returns false if the other end has closed the connection.
bool receive_up_to(int fd, size_t size, std::vector<std::byte>& got) {
  while (got.size() < size) {
    std::byte buffer[kHello];
    const ssize_t n = recv(fd, buffer, size - got.size(), MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 && errno == EAGAIN;
    append(got, buffer, static_cast<size_t>(n));
  }
  return true;
}

// Sends without retrying, because a handshake message always fits into the empty send buffer.
bool send_whole(int fd, std::span<const std::byte> bytes) {
  return ::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(bytes.size());
}

Fd listen_on(int family) {
  Fd fd(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return {};
  sockaddr_storage any{};
  any.ss_family = static_cast<sa_family_t>(family);
  int zero = 0;
  if (family == AF_INET6) setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &zero, sizeof zero);
  socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  bool bound = bind(fd.get(), reinterpret_cast<sockaddr*>(&any), size) == 0;
  return bound && listen(fd.get(), kTcpBacklog) == 0 ? std::move(fd) : Fd{};
}

uint16_t port_of(int fd) {
  sockaddr_storage own{};
  socklen_t size = sizeof own;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&own), &size) != 0) return 0;
  return ntohs(own.ss_family == AF_INET ? reinterpret_cast<sockaddr_in&>(own).sin_port
                                        : reinterpret_cast<sockaddr_in6&>(own).sin6_port);
}

// On failure, returns an invalid Fd and sets errno.
Fd begin_to_connect(const std::string& host, uint16_t port) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) {
    errno = EINVAL;
    return {};
  }
  Fd fd(socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd && errno == EMFILE) throw_system_error("cannot open a TCP socket", errno, kMoreFiles);
  const bool begun =
      fd && (connect(fd.get(), found->ai_addr, found->ai_addrlen) == 0 || errno == EINPROGRESS);
  const int error = errno;
  freeaddrinfo(found);
  errno = error;
  return begun ? std::move(fd) : Fd{};
}

Fd listening_socket() {
  Fd fd = listen_on(AF_INET6);
  return fd ? std::move(fd) : listen_on(AF_INET);
}

}  // namespace

TcpListener::TcpListener(const std::string& interface)
    : guarded_(listening_socket(), kMaxStrangers) {
  const std::vector<std::string> own = addresses_of(interfaces(), interface);
  if (guarded_.fd() >= 0) address_ = {own, port_of(guarded_.fd())};
}

std::vector<TcpPeer> TcpListener::accept(int32_t own, const std::vector<int32_t>& ranks,
                                         const Key128& key, Deadline deadline) {
  std::vector<TcpPeer> peers;
  std::vector<int32_t> missing = ranks;
  expect(ranks.size());
  for (;;) {
    look(own, key);  // comes before taking peers, because wait() does not wake up for proved peers
    std::erase_if(missing, [&](int32_t rank) {
      TcpPeer peer = take_proved(rank, kControlLine);
      if (!peer.fd) return false;
      peers.push_back(std::move(peer));
      return true;
    });
    if (missing.empty()) {
      forget(ranks.size());
      return peers;
    }
    if (deadline.expired()) {
      throw Error(ErrorCode::kPeer, "the leaders of other hosts, " + text_of_ranks(missing) +
                                        ", did not connect to rank " + std::to_string(own) +
                                        ". Check that no firewall blocks TCP between the hosts");
    }
    guarded_.wait(deadline);
  }
}

Fd TcpListener::take(int32_t own, int32_t rank, TcpLine line, const Key128& key) {
  look(own, key);
  return take_proved(rank, line).fd;
}

TcpPeer TcpListener::take_proved(int32_t rank, TcpLine line) {
  const auto found = std::ranges::find_if(
      proved_, [&](const TcpPeer& peer) { return peer.rank == rank && peer.line == line; });
  if (found == proved_.end()) return {};
  TcpPeer peer = std::move(*found);
  proved_.erase(found);
  return peer;
}

void TcpListener::look(int32_t own, const Key128& key) {
  guarded_.admit([&](Unauthenticated& caller) { return undecided(caller, own, key); });
}

bool TcpListener::undecided(Unauthenticated& caller, int32_t own, const Key128& key) {
  std::vector<std::byte>& got = caller.received;
  for (;;) {
    const bool greeted = caller.greeted();
    const size_t size = greeted ? kProof : kHello;
    // A caller that has hung up since its proof will call again. It is noticed by the byte after the proof.
    if (!receive_up_to(caller.fd.get(), size + (greeted ? 1 : 0), got)) return false;
    if (got.size() < size) return true;
    if (!greeted && !answer(caller, own, key)) return false;
    if (!greeted) continue;
    const bool proved = equal_keys(got, caller.wanted);
    if (proved && send_whole(caller.fd.get(), std::span(&kWelcome, 1))) {
      proved_.push_back({caller.rank, std::move(caller.fd), caller.line, caller.session});
    }
    return false;
  }
}

// Answers a hello. Returns false if the hello is invalid or the peer has closed the connection.
bool TcpListener::answer(Unauthenticated& caller, int32_t own, const Key128& key) {
  const std::byte* const hello = caller.received.data();
  if (std::memcmp(hello, kMagic, sizeof kMagic) != 0) return false;
  std::memcpy(&caller.rank, hello + 8, sizeof caller.rank);
  std::memcpy(&caller.line, hello + 12, sizeof caller.line);
  if (caller.rank < 0) return false;
  prepare(caller.fd.get());
  const Key128 nonce = random_key();
  const Handshake handshake{caller.rank, own, caller.line, hello + 20, nonce.data()};
  std::vector<std::byte> answer(nonce.begin(), nonce.end());
  const std::vector<std::byte> mine = handshake.proof_of('L', key);
  append(answer, mine.data(), mine.size());
  caller.wanted = handshake.proof_of('C', key);
  caller.session = handshake.of_listener(key);
  caller.received.clear();
  return send_whole(caller.fd.get(), answer);
}

TcpCaller::TcpCaller(int32_t own, int32_t rank, TcpLine line, TcpAddress address, const Key128& key)
    : own_(own), rank_(rank), line_(line), address_(std::move(address)), key_(key) {}

bool TcpCaller::step() {
  if (stage_ == Stage::kProved) return true;
  if (stage_ == Stage::kPause) {
    if (!due_.expired()) return false;
    dial();
  }
  if (stage_ == Stage::kConnecting) see_whether_connected();
  if (stage_ == Stage::kListening) hear();
  const bool talking = stage_ == Stage::kConnecting || stage_ == Stage::kListening;
  if (talking && due_.expired()) hang_up("no answer", stage_ == Stage::kConnecting);
  return stage_ == Stage::kProved;
}

void TcpCaller::dial() {
  if (address_.hosts.empty()) return hang_up("it has no usable address", true);
  stage_ = Stage::kConnecting;
  due_ = Deadline::in(kConnectPatience);
  fd_ = begin_to_connect(address_.hosts[next_], address_.port);
  if (!fd_) hang_up(std::strerror(errno), true);
}

void TcpCaller::see_whether_connected() {
  pollfd event{fd_.get(), POLLOUT, 0};
  if (poll(&event, 1, 0) <= 0) return;
  int error = 0;
  socklen_t size = sizeof error;
  getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  if (error != 0) return hang_up(std::strerror(error), true);
  prepare(fd_.get());
  nonce_ = random_key();
  received_.clear();
  std::vector<std::byte> hello;
  append(hello, kMagic, sizeof kMagic);
  append(hello, &own_, sizeof own_);
  append(hello, &line_, sizeof line_);
  append(hello, nonce_.data(), nonce_.size());
  if (!send_whole(fd_.get(), hello)) return hang_up(std::strerror(errno), true);
  stage_ = Stage::kListening;
  due_ = Deadline::in(kProofPatience);
}

// Receives the answer, sends the proof, and receives the welcome.
void TcpCaller::hear() {
  const auto wrong = [this] { hang_up("did not prove to be that rank", true); };
  if (received_.size() < kAnswer) {
    if (!receive_up_to(fd_.get(), kAnswer, received_)) return wrong();
    if (received_.size() < kAnswer) return;
    const Handshake handshake{own_, rank_, line_, nonce_.data(), received_.data()};
    const bool proved = equal_keys(std::span(received_).subspan(16), handshake.proof_of('L', key_));
    if (!proved || !send_whole(fd_.get(), handshake.proof_of('C', key_))) return wrong();
    session_ = handshake.of_caller(key_);
  }
  if (!receive_up_to(fd_.get(), kAnswer + 1, received_)) return wrong();
  if (received_.size() > kAnswer) stage_ = Stage::kProved;
}

// Ends this attempt. The next step() tries the next address, but after the last address it pauses first.
void TcpCaller::hang_up(const std::string& why, bool refused) {
  fd_.reset();
  stage_ = Stage::kPause;
  refused_ = refused ? std::min(refused_, Deadline::at(now_ns())) : Deadline::never();
  const std::string host = address_.hosts.empty() ? "" : address_.hosts[next_] + ": ";
  tried_ += (tried_.empty() ? "" : ", ") + host + why;
  due_ = Deadline::at(0);
  if (++next_ < address_.hosts.size()) return;
  next_ = 0;
  due_ = Deadline::in(kPause);
  tried_before_ = std::exchange(tried_, {});
}

void TcpCaller::wait(Deadline deadline) const {
  const short events = stage_ == Stage::kConnecting ? POLLOUT : POLLIN;
  pollfd event{fd_.get(), events, 0};  // poll() ignores a negative descriptor
  poll(&event, 1, std::min(deadline, due_).poll_ms());
}

bool TcpCaller::refused_for(std::chrono::nanoseconds time) const {
  return !refused_.is_never() && now_ns() - refused_.ns() > time.count();
}

std::string TcpCaller::trouble() const {
  return "port " + std::to_string(address_.port) + "; " +
         (tried_before_.empty() ? tried_ : tried_before_);
}

TcpPeer tcp_connect(int32_t own, int32_t rank, const TcpAddress& address, const Key128& key,
                    Deadline deadline) {
  TcpCaller caller(own, rank, kControlLine, address, key);
  while (!caller.step()) {
    if (deadline.expired()) {
      throw Error(ErrorCode::kPeer, "rank " + std::to_string(own) + " can't reach rank " +
                                        std::to_string(rank) + ", the leader of another host (" +
                                        caller.trouble() +
                                        "). Check that no firewall blocks TCP between the hosts");
    }
    caller.wait(deadline);
  }
  return {rank, std::move(caller.fd()), kControlLine, caller.session()};
}

}  // namespace farandole
