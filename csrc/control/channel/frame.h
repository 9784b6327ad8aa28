// SPDX-License-Identifier: Apache-2.0
// Messages between hosts as they travel: each in a frame with its number and a MAC under the connection's own key. Who
// relays a connection can end it, but can't change, repeat, reorder, drop or add a message unnoticed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "control/protocol/codec.h"
#include "lib/net/siphash.h"

namespace farandole {

// One direction of a connection.
class FrameWriter {
 public:
  explicit FrameWriter(const Key128& key = {}) : key_(key) {}
  // The next frame. `message` must not be empty.
  ByteString frame(ByteView message);

 private:
  Key128 key_;
  uint64_t number_ = 0;
};

// The other end of it.
class FrameReader {
 public:
  struct Frame {
    ByteView message;
    size_t bytes;  // of the whole frame
  };

  explicit FrameReader(const Key128& key = {}) : key_(key) {}
  // The frame that `arrived` begins with; none: it is not whole yet. Throws Error(kPeer) if it is not the next one of
  // the writer's; the connection is of no use then.
  std::optional<Frame> next(ByteView arrived);

 private:
  Key128 key_;
  uint64_t number_ = 0;
};

}  // namespace farandole
