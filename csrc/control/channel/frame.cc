// SPDX-License-Identifier: Apache-2.0
#include "control/channel/frame.h"

#include <cstring>

#include "base/error.h"
#include "lib/ipc/unix_socket.h"

namespace farandole {
namespace {

constexpr uint64_t kMostBytes = uint64_t{256} << 20;  // of a message

// A frame: this, the message, and the MAC of both.
struct Head {
  uint64_t bytes;   // of the message
  uint64_t number;  // of this frame in its direction, from 0
};
constexpr size_t kMacBytes = sizeof(Mac128);

[[noreturn]] void throw_altered(const char* what) {
  throw Error(ErrorCode::kPeer, std::string(what) +
                                    ": somebody on the network between the hosts has changed, "
                                    "repeated or left out what that rank sent");
}

}  // namespace

ByteString FrameWriter::frame(ByteView message) {
  const Head head{message.size(), number_++};
  const size_t sealed = sizeof head + message.size();
  ByteString framed(sealed + kMacBytes);
  std::memcpy(framed.data(), &head, sizeof head);
  std::memcpy(framed.data() + sizeof head, message.data(), message.size());
  const Mac128 mac = siphash128(key_, ByteView(framed).first(sealed));
  std::memcpy(framed.data() + sealed, mac.data(), kMacBytes);
  return framed;
}

std::optional<FrameReader::Frame> FrameReader::next(ByteView arrived) {
  if (arrived.size() < sizeof(Head)) return std::nullopt;
  const Head head = Decoder(arrived).get<Head>();
  if (head.bytes == 0 || head.bytes > kMostBytes || head.number != number_) {
    throw_altered("a control message out of turn");
  }
  const size_t sealed = sizeof(Head) + head.bytes;
  if (arrived.size() < sealed + kMacBytes) return std::nullopt;
  if (!equal_keys(arrived.subspan(sealed, kMacBytes), siphash128(key_, arrived.first(sealed)))) {
    throw_altered("a control message with a wrong MAC");
  }
  ++number_;
  return Frame{arrived.subspan(sizeof(Head), head.bytes), sealed + kMacBytes};
}

}  // namespace farandole
