// SPDX-License-Identifier: Apache-2.0
// What ranks launch together through the NCCL double, and how it is carried out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/types.h"
#include "lib/gpu/nccl.h"

namespace farandole::check {

using nccl::DataType;
using nccl::RedOp;

enum class What { kAllReduce, kBroadcast, kReduce, kAllGather, kReduceScatter, kSend, kReceive };

struct Call {
  What what;
  const std::byte* input;
  std::byte* output;
  size_t count;
  DataType type;
  RedOp op;
  int peer;  // or the root

  bool matches(const Call& other) const {
    return what == other.what && count == other.count && type == other.type && op == other.op &&
           peer == other.peer;
  }
};

// Collectives that all ranks of a communicator launch together, by rank. They meet by their order.
struct Launch {
  explicit Launch(size_t ranks) : calls(ranks), arrived(ranks) {}
  std::vector<std::vector<Call>> calls;
  std::vector<bool> arrived;                 // at the front of its stream
  std::vector<std::vector<std::byte>> kept;  // what calls of other processes point at
  bool done = false;
};

// A send and its receive, which meet by their order between two ranks; others take no part.
struct Transfer {
  std::vector<std::byte>
      bytes;  // what was sent, as it was when the send had come to the front of its stream
  bool sent = false;
  bool awaited = false;  // the receive has come to the front of its stream
};

DType dtype_of(DataType type);
size_t bytes_of(const Call& call);
// Once all ranks have arrived; only the first call does anything.
void run(Launch& launch);

}  // namespace farandole::check
