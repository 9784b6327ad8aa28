// SPDX-License-Identifier: Apache-2.0
// The memory of a host's flight recorders. It is a single segment that all ranks map, so that other ranks can read the
// last events of a dead rank. Other processes attach to the segment through /proc/PID/fd.
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

// One event of a tensor, a bucket or a rank, as stored by the flight recorder and the timeline.
enum class EventKind : uint8_t {
  kSubmit,      // this rank has submitted a call
  kNegotiated,  // this rank has read the call's log entry, so all ranks have submitted it
  kLaunched,    // a bucket has started to move
  kDone,        // a tensor's result is complete or, if the event has no call, a bucket has moved
  kError,       // a call has failed or, if the event has no call, the job has failed
  kPeerDied,    // `value` is the rank that died
  // The remaining kinds are for the timeline only. `value` is the duration in nanoseconds.
  kWait,     // a caller was blocked
  kStage,    // this rank made its input of a block accessible to its peers
  kReduce,   // this rank reduced all inputs of a block to a result
  kConsume,  // this rank copied the results of a block to its output
  kCycle,    // the driver has read a batch of log entries
};
const char* name_of(EventKind kind);

constexpr size_t kRecordedDimensions = 6;

struct FlightEvent {
  int64_t time_ns = 0;  // from CLOCK_MONOTONIC; for an event with a duration, its start
  int64_t call = 0;     // the handle; 0 if there is none
  uint64_t bytes = 0;
  uint64_t sequence = 0;  // kSubmit: number of an unnamed call; kNegotiated: log position
  // Number of the bucket in its set, from 1; 0 if there is none. For the submit of a send or receive, the tag.
  uint64_t bucket = 0;
  // See EventKind. For an error, the code. For the submit of a send or receive, the peer.
  int64_t value = 0;
  uint32_t name = 0;  // see Labels
  SetId set = 0;
  uint32_t thread = 0;
  EventKind kind = EventKind::kSubmit;
  uint8_t op = 0;
  uint8_t dtype = 0;
  uint8_t dimensions = 0;  // number of dimensions; only the first kRecordedDimensions are stored
  uint32_t site = 0;       // program line of a submitted call, see Labels
  int64_t shape[kRecordedDimensions] = {};

  size_t bytes_used() const {
    const size_t fit = dimensions < kRecordedDimensions ? dimensions : kRecordedDimensions;
    return offsetof(FlightEvent, shape) + fit * sizeof(int64_t);
  }
};
static_assert(sizeof(FlightEvent) == 120);  // Stamped<FlightEvent> fills two cache lines

// A call that has been submitted and has neither completed nor failed.
struct OpenCall {
  // Position of the call's log entry. If there is no entry yet, this and the next three fields are 0.
  uint64_t position = 0;
  uint64_t bucket = 0;
  int64_t negotiated_ns = 0;
  int64_t lane = 0;  // the process set to which the bucket belongs
  FlightEvent submit;
};

// A value in shared memory that any thread may write, and that any process may read without a lock. A stamp reveals a
// value that is incomplete because its writer died. Zeroed memory means that the value was never written.
template <class T>
class Stamped {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(uint64_t) == 0);
  static constexpr size_t kWords = sizeof(T) / sizeof(uint64_t);

 public:
  struct Seen {
    uint64_t number;
    T value;
  };

  // Writes the first `bytes` bytes of `value`. `number` must grow with each write. Returns false without writing if
  // another thread is writing or has already written a later number.
  bool write(uint64_t number, const T& value, size_t bytes = sizeof(T)) {
    const uint64_t writing = 2 * number + 1;
    uint64_t stamp = stamp_.load(std::memory_order_relaxed);
    if (stamp % 2 == 1 || stamp > writing) return false;
    if (!stamp_.compare_exchange_strong(stamp, writing, std::memory_order_acq_rel)) return false;
    std::array<uint64_t, kWords> words;
    const size_t used = (bytes + sizeof(uint64_t) - 1) / sizeof(uint64_t);
    std::memcpy(words.data(), &value, used * sizeof(uint64_t));
    // Release order: a reader that sees one of these words then reads the stamp `writing` or a later stamp.
    for (size_t i = 0; i < used; ++i) words_[i].store(words[i], std::memory_order_release);
    stamp_.store(writing + 1, std::memory_order_release);
    return true;
  }

  // Returns nullopt if the value was never written or is being written.
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
  std::atomic<uint64_t> stamp_;  // 2 * number + 1 during a write, + 2 afterwards
  std::atomic<uint64_t> words_[kWords];
};

// Counts values by magnitude. Slot i counts the values with i binary digits, which are the values below 2^i.
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

// The counters of a rank. All ranks of the host may read them.
struct Tally {
  std::atomic<uint64_t> submitted;  // number of tensors
  std::atomic<uint64_t> done;
  std::atomic<uint64_t> failed;
  std::atomic<uint64_t> bytes;    // total size of the tensors that are done
  std::atomic<uint64_t> buckets;  // number of buckets that have moved
  std::atomic<uint64_t> moving_ns;
  Histogram negotiation_ns;  // time from submit to log entry
  Histogram wait_ns;         // time during which a caller was blocked
  Histogram bucket_bytes;
  Histogram bandwidth;  // in MB/s: a bucket's bytes divided by the time from launch to done
  // The fields below describe the current state.
  std::atomic<uint32_t> waiters;  // number of threads that are blocked in wait
  std::atomic<uint32_t> waiting_for;
  std::atomic<int64_t> waiting_since_ns;
  std::atomic<int64_t> moving_since_ns;  // last launch of a bucket; 0 if a bucket has moved since
};

// Counts how often a rank was the last to submit a tensor, and sums the delays that the rank caused. Written by rank 0.
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
// Adds a line if there is room for it. Must not be called from two threads at a time.
void add_line(Stamped<FlightText>& lines, const std::string& text);

// The page of one rank. Zeroed memory is the page of a rank that has done nothing yet.
struct FlightPage {
  static constexpr size_t kEvents = 4096;
  static constexpr size_t kSets = 64;  // number of process sets whose ranks are stored
  static constexpr size_t kOpen = 1024;
  struct Identity {
    int32_t rank;
    int32_t size;
    int32_t world;  // number of the world
    int64_t pid;
    uint64_t start_time;  // distinguishes the process from a later process with the same pid
    int64_t began_ns;     // when init() was called
  };
  Stamped<Identity> identity;
  std::atomic<LifeState> state;
  std::atomic<uint64_t> recorded;  // number of events so far; only the last kEvents are stored
  std::atomic<uint64_t> dropped;   // events that were lost because two writers met in the same slot
  Stamped<FlightFailure> failure;  // the last failure
  Stamped<FlightText> story;       // one line for each world, which tells how it was formed
  // One line for each observation that looks wrong but has not caused a failure.
  Stamped<FlightText> findings;
  std::atomic<uint64_t> sets[kSets];  // id << 32 | label of the ranks; 0 if the entry is unused
  Tally tally;
  Stamped<FlightEvent> events[kEvents];
  // The handles of open calls (0 for an unused entry) and their details. They are kept here because `events` may have
  // overwritten the events of these calls.
  std::atomic<int64_t> open[kOpen];
  Stamped<OpenCall> open_calls[kOpen];
  LabelMemory labels;
};

class FlightMemory {
 public:
  static size_t bytes_needed(int local_ranks, int ranks);

  // This constructor is for ranks of the job. The leader calls prepare() on the zeroed memory.
  FlightMemory(std::byte* memory, int local_ranks, int ranks)
      : memory_(memory), local_ranks_(local_ranks), ranks_(ranks) {}
  void prepare();

  // For other processes. Returns nullopt unless this build has prepared the memory. Reads the header only once, because
  // a hostile writer may change it at any time.
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
