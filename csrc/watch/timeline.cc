// SPDX-License-Identifier: Apache-2.0
#include "watch/timeline.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/logging.h"
#include "lib/os/text_file.h"
#include "lib/os/thread.h"

namespace farandole {
namespace {

constexpr int64_t kFirstLane = 100'000'000;  // track of set 0; higher than any thread id
constexpr int64_t kMessages = kFirstLane - 2;
constexpr int64_t kSubmitNs = 1000;  // duration that a submission has in the trace

std::string upper(std::string text) {
  for (char& c : text) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return text;
}

std::string op_of(const FlightEvent& event) { return upper(name_of(static_cast<Op>(event.op))); }

constexpr size_t kEnough = 4096;                       // number of events that wake the writer
constexpr size_t kMost = 1u << 18;                     // events in memory; others are dropped
constexpr auto kRest = std::chrono::milliseconds(50);  // longest wait for kEnough events

}  // namespace

TraceFile::TraceFile(const std::string& path, const FlightPage& page)
    : page_(page), who_(page.identity.read()->value), file_(create_file(path)) {
  if (!file_) throw_system_error("cannot write the timeline " + path, errno);
  head();
  flush();
}

// If a rank is killed, its file lacks the closing bracket. Viewers accept such a file.
void TraceFile::head() {
  json_.open('[').line().open('{').member("ph", "M").member("name", "process_name");
  json_.member("pid", who_.rank).key("args").open('{');
  json_.member("name", "rank " + std::to_string(who_.rank)).close('}').close('}');
  json_.line().open('{').member("ph", "M").member("name", "process_sort_index");
  json_.member("pid", who_.rank).key("args").open('{').member("sort_index", who_.rank);
  json_.close('}').close('}');
  const int64_t now = now_ns();
  const int64_t epoch = epoch_ns();
  json_.line().open('{').member("ph", "M").member("name", "farandole").member("pid", who_.rank);
  json_.key("args").open('{').member("rank", who_.rank).member("size", who_.size);
  json_.member("epoch_minus_monotonic_ns", epoch - now);
  json_.member("start_time_since_epoch_in_micros", epoch / 1000).close('}').close('}');
}

void TraceFile::begin(const char* phase, const char* category, std::string_view name,
                      int64_t time_ns) {
  json_.line().open('{').member("ph", phase).member("cat", category).member("name", name);
  json_.member("pid", who_.rank).key("ts").microseconds(time_ns);
}

void TraceFile::name_track(int64_t track, const std::string& name) {
  if (!tracks_.insert(track).second) return;
  json_.line().open('{').member("ph", "M").member("name", "thread_name").member("pid", who_.rank);
  json_.member("tid", track).key("args").open('{').member("name", name).close('}').close('}');
}

int64_t TraceFile::lane_of(const FlightEvent& event) {
  if (is_pair(event.set)) {
    name_track(kMessages, "messages");
    return kMessages;
  }
  name_track(kFirstLane + event.set, "lane of process set " + std::to_string(event.set));
  return kFirstLane + event.set;
}

int64_t TraceFile::thread_of(const FlightEvent& event) {
  const int64_t thread = event.thread;
  name_track(thread, thread == who_.pid ? "main thread" : "thread " + std::to_string(thread));
  return thread;
}

// Writes an event that lasts `value` nanoseconds.
void TraceFile::slice(const char* category, std::string_view name, const FlightEvent& event,
                      int64_t track) {
  const int64_t began =
      event.kind == EventKind::kDone ? event.time_ns - event.value : event.time_ns;
  begin("X", category, name, began);
  json_.key("dur").microseconds(event.value).member("tid", track).key("args").open('{');
  if (event.kind == EventKind::kWait) json_.member("for", page_.labels.at(event.name));
  if (event.kind == EventKind::kDone) json_.member("bytes", event.bytes);
  json_.close('}').close('}');
}

void TraceFile::instant(const char* category, std::string_view name, const FlightEvent& event) {
  const int64_t track = thread_of(event);
  begin("i", category, name, event.time_ns);
  json_.member("s", "p").member("tid", track).close('}');
}

void TraceFile::async(const char* phase, const TracedCall& call, std::string_view name,
                      int64_t time_ns) {
  begin(phase, "tensor", name, time_ns);
  json_.member("id", call.id).member("tid", kFirstLane - 1).close('}');
}

// Ends the current stage of the call, then starts the stage `name`, or no stage if `name` is "".
void TraceFile::stage(TracedCall& call, std::string name, int64_t time_ns) {
  if (!call.stage.empty()) async("e", call, call.stage, time_ns);
  call.stage = std::move(name);
  if (!call.stage.empty()) async("b", call, call.stage, time_ns);
}

void TraceFile::submit(const FlightEvent& event) {
  TracedCall& call = open_[event.call];
  call.id = calls_++ * static_cast<uint64_t>(who_.size) + static_cast<uint64_t>(who_.rank);
  const std::string_view label = page_.labels.at(event.name);
  const std::string name =
      label.empty() ? "unnamed " + std::to_string(event.sequence) : std::string(label);
  call.name = std::string(name_of(static_cast<Op>(event.op))) + "." + name;  // as in Horovod
  const int64_t track = thread_of(event);
  begin("X", "submit", name, event.time_ns);
  json_.key("dur").microseconds(kSubmitNs).member("tid", track).key("args").open('{');
  json_.member("op", name_of(static_cast<Op>(event.op)));
  json_.member("dtype", name_of(static_cast<DType>(event.dtype))).member("bytes", event.bytes);
  json_.key("shape").open('[');
  const size_t fit = std::min<size_t>(event.dimensions, kRecordedDimensions);
  for (size_t i = 0; i < fit; ++i) json_.value(event.shape[i]);
  json_.close(']').member("process_set", event.set).close('}').close('}');
  begin("s", "bucket", "to its bucket", event.time_ns);
  json_.member("id", call.id).member("tid", track).close('}');
  async("b", call, call.name, event.time_ns);
  stage(call, "NEGOTIATE_" + op_of(event), event.time_ns);
}

void TraceFile::launch(const FlightEvent& event) {
  auto waiting = buckets_.extract({event.set, event.bucket});
  if (!waiting) return;
  const int64_t track = lane_of(event);
  for (int64_t number : waiting.mapped()) {
    auto call = open_.find(number);
    if (call == open_.end()) continue;
    begin("f", "bucket", "to its bucket", event.time_ns);
    json_.member("bp", "e").member("id", call->second.id).member("tid", track).close('}');
    stage(call->second, "MOVE", event.time_ns);
  }
}

void TraceFile::end_call(const FlightEvent& event) {
  auto call = open_.find(event.call);
  if (call == open_.end()) return;
  stage(call->second, "", event.time_ns);
  begin("e", "tensor", call->second.name, event.time_ns);
  json_.member("id", call->second.id).member("tid", kFirstLane - 1).key("args").open('{');
  if (event.kind == EventKind::kError) json_.member("error", event.value);
  json_.close('}').close('}');
  open_.erase(call);
}

void TraceFile::write(const FlightEvent& event) {
  auto call = open_.find(event.call);
  switch (event.kind) {
    case EventKind::kSubmit: return submit(event);
    case EventKind::kNegotiated:
      if (call == open_.end()) return;
      if (event.bucket != 0) buckets_[{event.set, event.bucket}].push_back(event.call);
      return stage(call->second, event.bucket != 0 ? "QUEUE" : "FINISH", event.time_ns);
    case EventKind::kLaunched: return launch(event);
    case EventKind::kError:
    case EventKind::kDone:
      if (event.call != 0) return end_call(event);
      if (event.kind == EventKind::kError) return;
      return slice("bucket", "bucket " + std::to_string(event.bucket), event, lane_of(event));
    case EventKind::kPeerDied:
      return instant("peer", "rank " + std::to_string(event.value) + " died", event);
    case EventKind::kWait: return slice("wait", "wait", event, thread_of(event));
    case EventKind::kStage: return slice("block", "pack", event, lane_of(event));
    case EventKind::kReduce: return slice("block", "reduce", event, lane_of(event));
    case EventKind::kConsume: return slice("block", "unpack", event, lane_of(event));
    case EventKind::kCycle: return instant("cycle", "CYCLE_START", event);
  }
}

void TraceFile::flush() {
  if (!broken_ && !write_whole(file_.get(), json_.text())) {
    broken_ = true;
    log(LogLevel::kWarning, "the timeline ends early: it can't be written (disk full?)");
  }
  json_.forget();
}

void TraceFile::close(uint64_t dropped) {
  if (dropped > 0) {
    begin("i", "timeline", std::to_string(dropped) + " events dropped", now_ns());
    json_.member("s", "g").member("tid", kFirstLane - 1).close('}');
  }
  json_.line().close(']');
  flush();
  file_.reset();
}

void Timeline::start(const std::string& path, bool mark_cycles) {
  std::lock_guard control(control_mutex_);
  if (file_) {
    throw Error(ErrorCode::kInvalidArgument,
                "a timeline is being written already; call stop_timeline() first");
  }
  file_ = std::make_unique<TraceFile>(path, page_);
  {
    std::lock_guard lock(mutex_);  // threads may still be in add() for the previous timeline
    stopping_ = false;
    dropped_ = 0;
  }
  try {
    writer_ = start_thread("farandole-trace", [this] { write_all(); });
  } catch (...) {
    file_.reset();
    throw;
  }
  mark_cycles_ = mark_cycles;
  listening_ = true;
}

void Timeline::stop() {
  std::lock_guard control(control_mutex_);
  if (!file_) return;
  listening_ = mark_cycles_ = false;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  enough_.notify_one();
  writer_.join();
  std::unique_lock lock(mutex_);
  const uint64_t dropped = dropped_;
  lock.unlock();
  file_->close(dropped);
  file_.reset();
}

void Timeline::add(const FlightEvent& event) {
  bool wake = false;
  {
    std::lock_guard lock(mutex_);
    if (stopping_) return;
    if (events_.size() >= kMost) {
      ++dropped_;
      return;
    }
    events_.push_back(event);
    wake = events_.size() == kEnough;
  }
  if (wake) enough_.notify_one();
}

void Timeline::write_all() {
  std::vector<FlightEvent> batch;
  for (bool last = false; !last;) {
    batch.clear();
    {
      std::unique_lock lock(mutex_);
      // Uses the system clock, because glibc before 2.30 cannot wait on any other clock.
      enough_.wait_until(lock, std::chrono::system_clock::now() + kRest,
                         [this] { return stopping_ || events_.size() >= kEnough; });
      last = stopping_;
      std::swap(batch, events_);
    }
    for (const FlightEvent& event : batch) file_->write(event);
    if (!batch.empty()) file_->flush();
  }
}

std::string timeline_path(const std::string& path, Rank rank) {
  if (rank == 0) return path;
  const size_t slash = path.find_last_of('/');
  const size_t dot = path.find_last_of('.');
  const bool suffixed = dot != std::string::npos && (slash == std::string::npos || dot > slash + 1);
  const size_t at = suffixed ? dot : path.size();
  return path.substr(0, at) + ".rank" + std::to_string(rank) + path.substr(at);
}

}  // namespace farandole
