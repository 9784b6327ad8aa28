// SPDX-License-Identifier: Apache-2.0
#include "watch/timeline.h"

#include <chrono>
#include <utility>

#include "base/error.h"
#include "lib/os/thread.h"

namespace farandole {
namespace {

constexpr size_t kEnough = 4096;    // events for which the writer is woken
constexpr size_t kMost = 1u << 18;  // events in memory; more are dropped and counted
constexpr auto kRest = std::chrono::milliseconds(50);  // until events are written however few

}  // namespace

void Timeline::start(const std::string& path, bool mark_cycles) {
  std::lock_guard control(control_mutex_);
  if (file_) {
    throw Error(ErrorCode::kInvalidArgument,
                "a timeline is being written already; call stop_timeline() first");
  }
  file_ = std::make_unique<TraceFile>(path, page_);
  {
    std::lock_guard lock(mutex_);  // threads may still add to the previous timeline
    stopping_ = false;
    dropped_ = 0;
    events_.clear();
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
      // By this clock, because glibc before 2.30 waits by no other.
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
