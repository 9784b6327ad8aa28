// SPDX-License-Identifier: Apache-2.0
// The memory of a host's flight recorders: one segment that all ranks map, so that other ranks can read a dead rank's
// last events. Other processes attach to the segment through /proc/PID/fd.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <type_traits>

#include "base/types.h"
#include "watch/labels.h"

namespace farandole {

// One event of a tensor, bucket or rank, as the flight recorder and the timeline store it.
enum class EventKind : uint8_t {
  kSubmit,      // this rank has submitted a call
  kNegotiated,  // this rank has read the call's log entry, so all ranks have submitted it
  kLaunched,    // a bucket starts to move
  kDone,        // a tensor's result is complete; without a call: a bucket has moved
  kError,       // a call failed; without a call: the job failed
  kPeerDied,    // `value`: the rank
  // Timeline only; `value`: duration in nanoseconds.
  kWait,     // a caller was blocked
  kStage,    // of a block: this rank makes its input accessible to peers
  kReduce,   // of a block: this rank reduces all inputs to a result
  kConsume,  // of a block: this rank copies results to its output
  kCycle,    // the driver has read a batch of log entries
};
const char* name_of(EventKind kind);

constexpr size_t kRecordedDimensions = 6;

struct FlightEvent {
  int64_t time_ns = 0;  // CLOCK_MONOTONIC; the start of an event with a duration
  int64_t call = 0;     // the handle; 0: none
  uint64_t bytes = 0;
  uint64_t sequence = 0;  // submit: number of an unnamed call. negotiated: position in the log
  uint64_t bucket = 0;    // number in the set, from 1; 0: none. submit of a send or receive: tag
  int64_t value = 0;      // see EventKind. error: the code; submit of a send or receive: the peer
  uint32_t name = 0;      // see Labels
  SetId set = 0;
  uint32_t thread = 0;
  EventKind kind = EventKind::kSubmit;
  uint8_t op = 0;
  uint8_t dtype = 0;
  uint8_t dimensions = 0;  // number of dimensions; only the first kRecordedDimensions are stored
  uint32_t site = 0;       // program line of a submit, see Labels
  int64_t shape[kRecordedDimensions] = {};

  size_t bytes_used() const {
    const size_t fit = dimensions < kRecordedDimensions ? dimensions : kRecordedDimensions;
    return offsetof(FlightEvent, shape) + fit * sizeof(int64_t);
  }
};
static_assert(sizeof(FlightEvent) == 120);  // Stamped<FlightEvent> fills two cache lines

// A call that is submitted and neither done nor failed.
struct OpenCall {
  uint64_t position = 0;  // of its log entry; 0: no entry yet, and the next three fields are 0, too
  uint64_t bucket = 0;
  int64_t negotiated_ns = 0;
  int64_t lane = 0;  // the process set of the bucket
  FlightEvent submit;
};

// A value in shared memory that any thread may write and any process may read without a lock. A stamp shows if the
// value is incomplete because its writer died. Zeroed memory counts as never written.
template <class T>
class Stamped {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(uint64_t) == 0);
  static constexpr size_t kWords = sizeof(T) / sizeof(uint64_t);

 public:
  struct Seen {
    uint64_t number;
    T value;
  };

  // Writes the first `bytes` of `value`; `number` must grow with each write. Returns false without writing if another
  // thread is writing, or has written a later number.
  bool write(uint64_t number, const T& value, size_t bytes = sizeof(T)) {
    const uint64_t writing = 2 * number + 1;
    uint64_t stamp = stamp_.load(std::memory_order_relaxed);
    if (stamp % 2 == 1 || stamp > writing) return false;
    if (!stamp_.compare_exchange_strong(stamp, writing, std::memory_order_acq_rel)) return false;
    std::array<uint64_t, kWords> words;
    const size_t used = (bytes + sizeof(uint64_t) - 1) / sizeof(uint64_t);
    std::memcpy(words.data(), &value, used * sizeof(uint64_t));
    // Release: a reader that sees one of these words then reads the stamp `writing` or a later one.
    for (size_t i = 0; i < used; ++i) words_[i].store(words[i], std::memory_order_release);
    stamp_.store(writing + 1, std::memory_order_release);
    return true;
  }

  // nullopt: never written, or being written.
  std::optional<Seen> read() const {
    const uint64_t before = stamp_.load(std::memory_order_acquire);
    if (before == 0 || before % 2 == 1) return std::nullopt;
    std::array<uint64_t, kWords> words;
    for (size_t i = 0; i < kWords; ++i) words[i] = words_[i].load(std::memory_order_acquire);
    if (stamp_.load(std::memory_order_relaxed) != before) return std::nullopt;
    Seen seen{before / 2 - 1, {}};
    std::memcpy(static_cast<void*>(&seen.value), words.data(), sizeof(T));
    return seen;
  }

 private:
  std::atomic<uint64_t> stamp_;  // 2 * number + 1: being written; + 2: complete
  std::atomic<uint64_t> words_[kWords];
};

// Counts values by magnitude. Slot i counts values with i binary digits, which are below 2^i.
struct Histogram {
  static constexpr size_t kSlots = 48;
  std::atomic<uint64_t> count;
  std::atomic<uint64_t> sum;
  std::atomic<uint64_t> slots[kSlots];

  void add(uint64_t value) {
    const size_t digits = static_cast<size_t>(std::bit_width(value));
    count.fetch_add(1, std::memory_order_relaxed);
    sum.fetch_add(value, std::memory_order_relaxed);
    slots[std::min(digits, kSlots - 1)].fetch_add(1, std::memory_order_relaxed);
  }
};

// A rank's counters. Every rank of the host may read them.
struct Tally {
  std::atomic<uint64_t> submitted;  // tensors
  std::atomic<uint64_t> done;
  std::atomic<uint64_t> failed;
  std::atomic<uint64_t> bytes;    // of tensors that are done
  std::atomic<uint64_t> buckets;  // buckets that have moved
  std::atomic<uint64_t> moving_ns;
  Histogram negotiation_ns;  // from submit to log entry
  Histogram wait_ns;         // time for which a caller was blocked
  Histogram bucket_bytes;
  Histogram bandwidth;  // MB/s: a bucket's bytes divided by the time from launch to done
  // Current state
  std::atomic<uint32_t> waiters;  // threads blocked in wait
  std::atomic<uint32_t> waiting_for;
  std::atomic<int64_t> waiting_since_ns;
  std::atomic<int64_t> moving_since_ns;  // last launch of a bucket; 0: a bucket has moved since
};

// Number of times that a rank was the last to submit a tensor, and the total delay by that rank. Rank 0 writes it.
struct Lateness {
  std::atomic<uint64_t> times;
  std::atomic<uint64_t> ns;
};

enum class LifeState : uint32_t { kRunning, kLeft, kFailed, kDied };
const char* name_of(LifeState state);

struct FlightFailure {
  static constexpr size_t kTextBytes = 1016;
  int32_t code;
  uint32_t length;
  char text[kTextBytes];
};

struct FlightText {
  static constexpr size_t kBytes = 8184;
  uint64_t length;
  char text[kBytes];
};
// Adds a line if there is room. Call from one thread at a time.
void add_line(Stamped<FlightText>& lines, const std::string& text);

// One rank's page. Zeroed memory is a rank that has done nothing.
struct FlightPage {
  static constexpr size_t kEvents = 4096;
  static constexpr size_t kSets = 64;  // process sets whose ranks are stored
  static constexpr size_t kOpen = 1024;
  struct Identity {
    int32_t rank;
    int32_t size;
    int32_t world;  // number of the world
    int64_t pid;
    uint64_t start_time;  // distinguishes the process from a later one with the same pid
    int64_t began_ns;     // time of init()
  };
  Stamped<Identity> identity;
  std::atomic<LifeState> state;
  std::atomic<uint64_t> recorded;  // number of events; the last kEvents are stored
  std::atomic<uint64_t> dropped;   // events lost because two writers met in one slot
  Stamped<FlightFailure> failure;  // the last failure
  Stamped<FlightText> story;       // a line for each world: how it was formed
  Stamped<FlightText> findings;    // a line for each suspicious observation, though nothing failed
  std::atomic<uint64_t> sets[kSets];  // id << 32 | label of the ranks; 0: unused
  Tally tally;
  Stamped<FlightEvent> events[kEvents];
  // Open calls: handles (0: none), and details. `events` may have overwritten the events of these calls.
  std::atomic<int64_t> open[kOpen];
  Stamped<OpenCall> open_calls[kOpen];
  LabelMemory labels;
};

class FlightMemory {
 public:
  static size_t bytes_needed(int local_ranks, int ranks);

  // For ranks of the job. The leader calls prepare() on the zeroed memory.
  FlightMemory(std::byte* memory, int local_ranks, int ranks)
      : memory_(memory), local_ranks_(local_ranks), ranks_(ranks) {}
  void prepare();

  // For other processes. nullopt: the memory was not prepared by this build. Reads the header once, because a hostile
  // writer may change it.
  static std::optional<FlightMemory> attach(std::byte* memory, size_t bytes);

  int local_ranks() const { return local_ranks_; }
  int ranks() const { return ranks_; }
  FlightPage& page(int local) const;
  Lateness& lateness(Rank rank) const;

 private:
  struct Header {
    uint64_t magic;
    int32_t local_ranks;
    int32_t ranks;
  };
  static size_t pages_begin(int ranks);

  std::byte* memory_;
  int local_ranks_;
  int ranks_;
};

}  // namespace farandole
