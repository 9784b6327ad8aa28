// SPDX-License-Identifier: Apache-2.0
// One rank's events in the Trace Event Format of Chrome and Perfetto. Tracks: each calling thread
// (submissions and waits), each process set's lane (buckets and their blocks), and one line per tensor in
// flight, with an arrow to its bucket.
#pragma once

#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/json.h"
#include "lib/os/fd.h"
#include "watch/flight_memory.h"

namespace farandole {

class TraceFile {
 public:
  // Throws Error(kLibrary) if the file can't be created. `page` must outlive this.
  TraceFile(const std::string& path, const FlightPage& page);

  void write(const FlightEvent& event);
  void flush();  // writes to the file; a failure is logged once
  void close(uint64_t dropped);

 private:
  struct OpenCall {
    uint64_t id = 0;  // unique among all ranks
    std::string name;
    std::string stage;  // the current one, for viewers
  };

  void head();
  void begin(const char* phase, const char* category, std::string_view name, int64_t time_ns);
  void slice(const char* category, std::string_view name, const FlightEvent& event, int64_t track);
  void instant(const char* category, std::string_view name, const FlightEvent& event);
  void name_track(int64_t track, const std::string& name);
  void stage(OpenCall& call, std::string name, int64_t time_ns);
  void async(const char* phase, const OpenCall& call, std::string_view name, int64_t time_ns);
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
  std::unordered_map<int64_t, OpenCall> open_;
  std::map<std::pair<SetId, uint64_t>, std::vector<int64_t>> buckets_;  // calls waiting in each
};

}  // namespace farandole
