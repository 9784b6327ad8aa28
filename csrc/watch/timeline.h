// SPDX-License-Identifier: Apache-2.0
// Writes the events of this rank as a trace for Chrome or Perfetto. Other threads append events to a list in memory.
// The timeline's own thread writes them to the file, twenty times a second and whenever there are many.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/json.h"
#include "lib/os/fd.h"
#include "lib/os/thread.h"
#include "watch/flight_memory.h"

namespace farandole {

// One rank's events in the Trace Event Format of Chrome and Perfetto. Each calling thread has a track for submissions
// and waits, and each set's lane for buckets and blocks. Each tensor in flight has a line, with an arrow to its bucket.
class TraceFile {
 public:
  // Throws Error(kLibrary) if the file cannot be created. `page` must outlive this object.
  TraceFile(const std::string& path, const FlightPage& page);

  void write(const FlightEvent& event);
  void flush();  // writes to the file; logs only the first failure
  void close(uint64_t dropped);

 private:
  struct TracedCall {
    uint64_t id = 0;  // unique among all ranks
    std::string name;
    std::string stage;  // the stage that is open in the trace, or "" if there is none
  };

  void head();
  void begin(const char* phase, const char* category, std::string_view name, int64_t time_ns);
  void slice(const char* category, std::string_view name, const FlightEvent& event, int64_t track);
  void instant(const char* category, std::string_view name, const FlightEvent& event);
  void name_track(int64_t track, const std::string& name);
  void stage(TracedCall& call, std::string name, int64_t time_ns);
  void async(const char* phase, const TracedCall& call, std::string_view name, int64_t time_ns);
  void submit(const FlightEvent& event);
  void launch(const FlightEvent& event);
  void end_call(const FlightEvent& event);
  int64_t lane_of(const FlightEvent& event);
  int64_t thread_of(const FlightEvent& event);

  const FlightPage& page_;
  FlightPage::Identity who_;
  Fd file_;
  Json json_;
  bool broken_ = false;
  uint64_t calls_ = 0;
  std::set<int64_t> tracks_;
  std::unordered_map<int64_t, TracedCall> open_;
  std::map<std::pair<SetId, uint64_t>, std::vector<int64_t>> buckets_;  // the calls in each bucket
};

class Timeline {
 public:
  explicit Timeline(const FlightPage& page) : page_(page) {}
  ~Timeline() { stop(); }
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  // Creates the file. Throws Error(kLibrary) if that fails, or Error(kInvalidArgument) if a timeline is being written.
  void start(const std::string& path, bool mark_cycles);
  // Writes the remaining events and closes the file, if a file is open.
  void stop();

  // ---- May be called from any thread at any time
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
  Thread writer_;
};

// Returns the path of a rank's file: `path` for rank 0, NAME.rankN.SUFFIX in the same folder for rank N.
std::string timeline_path(const std::string& path, Rank rank);

}  // namespace farandole
