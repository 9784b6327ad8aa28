// SPDX-License-Identifier: Apache-2.0
// What NCCL's host code leaves in device memory for its kernels, as far as the double reads it: offsets and sizes of 2.28.9
// (src/include/device.h), and in a table what differs in other versions. Nothing here is NCCL's code.
#pragma once

#include <cstddef>
#include <cstdint>

namespace farandole::check::device {

constexpr int kSteps = 8;  // slots of a connection's buffer
constexpr int kProtocols = 3;
constexpr int kSimple = 2;
constexpr int kMaxChannels = 64;

struct Slot {  // what kernel and proxy tell each other about one
  int mode;
  int offset;
  int64_t bytes;
  void* pointer;
};
constexpr int kAtOffset = 1;  // its mode

struct Connection {
  std::byte* buffers[kProtocols];
  void* handles[kProtocols];
  uint64_t* tail;
  uint64_t* head;
  int flags;
  int shared;
  int step_bytes;
  void** pointers;
  uint64_t* operators;
  Slot* slots;
  uint64_t step;
  uint64_t cleaned;
  int plugin[2];  // a network plugin's own; more follows
  void* plugin_handle;
  int64_t plugin_bytes;
  int plugin_flag;
};

struct Peer {
  Connection send[2];
  Connection receive[2];
};

struct Ring {
  int previous;
  int next;
  int* ranks;  // from this one on
};

struct Communicator {
  int rank;
  int ranks;
  int node;
  int nodes;
  int buffer_bytes[kProtocols];
  int step_bytes_of_transfers;
  int flags;
  int* unused;
  volatile uint32_t* abort;
};

// A piece of work of a collective begins with this; where the rest lies depends on the version.
struct CollectiveHead {
  uint32_t first_channel : 8, last_channel : 8, warps : 8;
  uint32_t scale_is_pointer : 1, registered : 1, network_registered : 1, others : 4, profiled : 1;
  uint32_t root;
};
struct CollectiveBuffers {
  std::byte* output;
  const std::byte* input;
};
struct CollectiveCounts {
  size_t first, middle, last;  // elements of the channels
  uint64_t grains_first : 21, grains_middle : 21, grains_last : 21;
};
constexpr size_t kGrain = 512;  // bytes

struct alignas(16) Transfers {  // a send and a receive
  const std::byte* input;
  std::byte* output;
  size_t sent, received;
  int to, from;
  uint8_t channels, first_channel, send_channels, receive_channels;
  uint8_t send_chunk, receive_chunk;  // an 8-bit float
  uint8_t send_low_latency : 1, receive_low_latency : 1;
  uint8_t network_registered : 2, registered : 2, profiled : 1;
};

enum WorkType : uint32_t { kTransfers, kCollective, kRegisteredCollective };

struct alignas(16) Batch {
  uint32_t jump : 14, extends : 1, type : 2, function : 15;
  uint32_t offset;
  uint64_t works;  // a bit for each, from there
};

struct alignas(16) Arguments {
  std::byte* communicator;
  uint64_t channels;  // a bit for each
  uint8_t storage;    // 0: behind the arguments
  uint32_t mask;
  std::byte* works;
};

// In one block: a communicator, then its channels.
constexpr size_t kChannels = 96;
constexpr size_t kChannelBytes = 368;
struct Channel {
  Peer** peers;
  Ring ring;
};

// What differs between versions: bytes of a collective's work, where its parts lie, and where a ring has this rank's place.
struct Layout {
  int from;  // the first version
  size_t work, buffers, counts, scale;
  size_t place;
};
constexpr Layout kLayouts[] = {{22800, 96, 8, 56, 88, 16}, {23000, 128, 24, 80, 112, 24}};

static_assert(sizeof(Connection) == 152 && sizeof(Transfers) == 48 && sizeof(Arguments) == 32);

}  // namespace farandole::check::device
