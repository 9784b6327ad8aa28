// SPDX-License-Identifier: Apache-2.0
// Writes this rank's events as a trace for Chrome or Perfetto. Other threads append events to memory; a
// thread of its own writes the file, twenty times a second or when many have come.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "watch/flight_memory.h"
#include "watch/trace_text.h"

namespace farandole {

class Timeline {
 public:
  explicit Timeline(const FlightPage& page) : page_(page) {}
  ~Timeline() { stop(); }
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  // Creates the file. Throws Error: kInvalidArgument if a timeline is being written, kLibrary if it can't be.
  void start(const std::string& path, bool mark_cycles);
  // Writes the rest and closes the file. Idempotent.
  void stop();

  // ---- Any thread, at any time
  const std::atomic<bool>& listening() const { return listening_; }
  bool listens() const { return listening_.load(std::memory_order_relaxed); }
  bool marks_cycles() const { return mark_cycles_.load(std::memory_order_relaxed); }
  void add(const FlightEvent& event);

 private:
  void write_all();

  const FlightPage& page_;
  std::mutex control_mutex_;  // for start() and stop()
  std::atomic<bool> listening_{false};
  std::atomic<bool> mark_cycles_{false};

  std::mutex mutex_;
  std::condition_variable enough_;
  std::vector<FlightEvent> events_;
  uint64_t dropped_ = 0;
  bool stopping_ = false;

  std::unique_ptr<TraceFile> file_;
  std::thread writer_;
};

// The file of a rank if the job writes to `path`: for rank 0 itself, for rank 2 NAME.rank2.SUFFIX beside it.
std::string timeline_path(const std::string& path, Rank rank);

}  // namespace farandole
