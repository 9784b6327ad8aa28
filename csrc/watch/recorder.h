// SPDX-License-Identifier: Apache-2.0
// The flight recorder's pen: always on, about 100 ns an event. One for each rank; what it writes is in
// FlightMemory, which outlives the rank.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "watch/flight_memory.h"
#include "watch/timeline.h"

namespace farandole {

// What the recorder has to know of a call on its way; kept beside the call.
struct RecordedCall {
  int64_t call = 0;
  uint32_t name = kNoLabel;
  SetId set = 0;
  Op op = Op::kAllreduce;
  DType dtype = DType::kUInt8;
  uint64_t bytes = 0;
  uint64_t bucket = 0;
  int64_t submitted_ns = 0;
};

class Recorder {
 public:
  Recorder(FlightMemory memory, int local, FlightPage::Identity identity);

  // ---- one thread at a time: the runtime holds its mutex
  uint32_t label_of(std::string_view name) { return labels_.label_of(name); }
  void open_set(SetId set, const std::vector<Rank>& ranks);
  void close_set(SetId set);

  // ---- any thread
  void submitted(RecordedCall& call, uint64_t sequence, std::span<const int64_t> shape);
  // The calls of a bucket share one look at the clock.
  void negotiated(RecordedCall& call, uint64_t bucket, uint64_t log_position, int64_t time_ns);
  void done(const RecordedCall& call, int64_t time_ns);
  void failed(const RecordedCall& call, const Failure& failure);
  // A bucket of `tensors` begins to move; returns the time.
  int64_t launched(SetId set, uint64_t bucket, size_t tensors, uint64_t bytes);
  void moved(SetId set, uint64_t bucket, uint64_t bytes, int64_t launched_ns);
  void job_failed(const Failure& failure);
  void peer_died(Rank rank, int its_local);
  void left();
  // On rank 0: `rank` was the last to submit, so long after the first.
  void late(Rank rank, int64_t ns);

  // A caller begins to block in wait, and stops. Waits are cut in slices: `over` is false if this one
  // goes on at once.
  void wait_begins(int64_t call, uint32_t name);
  void wait_ends(bool over);

  // For the timeline alone: work that has taken this time, on a set's lane; a batch of the log.
  void worked(EventKind phase, SetId set, int64_t begin_ns, int64_t end_ns);
  void cycle();

  Timeline& timeline() { return timeline_; }
  const FlightMemory& memory() const { return memory_; }
  FlightPage& page() { return page_; }

 private:
  bool traced() const { return timeline_.listening().load(std::memory_order_relaxed); }
  void record(FlightEvent event);
  void keep_failure(const Failure& failure);
  FlightEvent event_of(EventKind kind, const RecordedCall& call) const;

  FlightMemory memory_;
  FlightPage& page_;
  Tally& tally_;
  Labels labels_;
  Timeline timeline_;
  std::atomic<uint64_t> failures_{0};
};

}  // namespace farandole
