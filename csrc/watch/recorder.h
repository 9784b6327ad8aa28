// SPDX-License-Identifier: Apache-2.0
// Writes a rank's flight recorder, which is always on. Recording an event takes about 100 ns. There is one Recorder per
// rank. The FlightMemory outlives the Recorder.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "watch/flight_memory.h"
#include "watch/timeline.h"

namespace farandole {

// The recorder's data about a call, stored in the call's Submission.
struct RecordedCall {
  int64_t call = 0;
  uint32_t name = kNoLabel;
  uint32_t site = kNoLabel;  // line of the user's program
  SetId set = 0;
  Op op = Op::kAllreduce;
  DType dtype = DType::kUInt8;
  Rank peer = kAnyRank;  // peer and tag are for sends and receives only
  int64_t tag = 0;
  uint64_t bytes = 0;
  uint64_t bucket = 0;
  int64_t submitted_ns = 0;
  size_t place = FlightPage::kOpen;  // slot in the table of open calls; kOpen if it was full
};

class Recorder {
 public:
  // Dumps are written to `folder`. If it is empty, there are no dumps.
  Recorder(FlightMemory memory, int local, FlightPage::Identity identity, std::string folder = {});

  // ---- The caller must hold RankCalls::mutex_
  uint32_t label_of(std::string_view name) { return labels_.label_of(name); }
  void open_set(SetId set, const std::vector<Rank>& ranks);
  void close_set(SetId set);
  void submitted(RecordedCall& call, uint64_t sequence, std::span<const int64_t> shape);

  // ---- May be called from any thread
  // `time_ns` is the current time. It is an argument so that all calls of a bucket share a single reading of the clock.
  void negotiated(RecordedCall& call, uint64_t bucket, uint64_t log_position, int64_t time_ns);
  void done(const RecordedCall& call, int64_t time_ns);
  void failed(const RecordedCall& call, const Failure& failure);
  // Records that a bucket has started to move. Returns the current time.
  int64_t launched(SetId set, uint64_t bucket, size_t tensors, uint64_t bytes);
  void moved(SetId set, uint64_t bucket, uint64_t bytes, int64_t launched_ns);
  void job_failed(const Failure& failure);
  void peer_died(Rank rank, int its_local);
  void left();
  // For rank 0. Records that `rank` was the last to submit a tensor, `ns` nanoseconds after the others.
  void late(Rank rank, int64_t ns);

  // Record that a caller starts or stops waiting. `over` is false if the wait was interrupted and will be repeated.
  void wait_begins(int64_t call, uint32_t name);
  void wait_ends(bool over);

  // For the timeline only. worked() records that a set's lane has done a phase of a block. cycle() records that the
  // driver has read log entries.
  void worked(EventKind phase, SetId set, int64_t begin_ns, int64_t end_ns);
  void cycle();

  // See farandole_story() and farandole_finding().
  void tell_story(const std::string& text) { tell(page_.story, text, "a new world"); }
  void tell_finding(const std::string& text) { tell(page_.findings, text, text); }
  // Dumps the recorders of all ranks of this host. Does not throw.
  void dump_host(const std::string& reason);

  Timeline& timeline() { return timeline_; }
  const FlightMemory& memory() const { return memory_; }

 private:
  void record(FlightEvent event);
  void keep_failure(const Failure& failure);
  void tell(Stamped<FlightText>& lines, const std::string& text, const std::string& reason);
  void dump_own(const std::string& reason);
  void dump(std::span<const int> locals, const std::string& reason);
  size_t open(const FlightEvent& submit);
  void close(const RecordedCall& call);

  FlightMemory memory_;
  const int local_;
  const std::string folder_;
  std::mutex abandoned_mutex_;
  std::weak_ptr<const void> abandoned_;  // a dump that a hanging disk has not yet accepted
  std::mutex lines_mutex_;
  std::atomic<uint64_t> dumped_{0};  // one bit per failure code that was dumped
  FlightPage& page_;
  Tally& tally_;
  Labels labels_;
  Timeline timeline_;
  std::atomic<uint64_t> failures_{0};
  std::atomic<uint64_t> open_writes_{0};
  std::atomic<uint64_t> places_[FlightPage::kOpen / 64]{};  // a bit per used slot of open calls
};

}  // namespace farandole
