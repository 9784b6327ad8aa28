// SPDX-License-Identifier: Apache-2.0
// The part of the C ABI for watching: flight recorders of this or another job, timelines, the init watchdog.
#include "api/api_entry.h"
#include "watch/flight_text.h"

using namespace farandole;

namespace {

FlightView view_of(int32_t fd) {
  if (fd >= 0) return FlightView(fd);
  return FlightView(runtime()->watch().flight_fd());
}

}  // namespace

FARANDOLE_API int32_t farandole_flight_ranks(int32_t fd) {
  return negated([&]() -> int32_t { return view_of(fd).local_ranks(); });
}

FARANDOLE_API int64_t farandole_flight(int32_t fd, int32_t local, int32_t events, char* text,
                                       int64_t capacity) {
  return negated([&]() -> int64_t {
    const std::string whole = view_of(fd).text(local, static_cast<size_t>(std::max(events, 0)));
    const size_t fits = std::min(whole.size(), static_cast<size_t>(std::max<int64_t>(capacity, 0)));
    if (fits > 0) std::memcpy(text, whole.data(), fits);
    return static_cast<int64_t>(whole.size());
  });
}

FARANDOLE_API int32_t farandole_story(const char* text) {
  return guarded([&] { runtime()->watch().tell_story(text); });
}

FARANDOLE_API int32_t farandole_finding(const char* text) {
  return guarded([&] { runtime()->watch().tell_finding(text); });
}

FARANDOLE_API int32_t farandole_dump(int32_t fd, const char* folder, const char* reason) {
  return guarded([&] { view_of(fd).dump(folder, reason); });
}

FARANDOLE_API int32_t farandole_end_after(double seconds, const char* text, int32_t count,
                                          const int32_t* processes, const char* const* texts) {
  return guarded([&] {
    std::unique_ptr<Watchdog> limit;
    if (seconds >= 0) {
      std::vector<Watchdog::Awaited> awaited;
      for (int32_t i = 0; i < count; ++i) {
        const uint64_t start = process_start_time(processes[i]).value_or(0);
        std::optional<PidFd> other = PidFd::open(processes[i], start);
        if (other) awaited.push_back({std::move(*other), texts[i]});
      }
      limit = std::make_unique<Watchdog>(deadline_in(seconds), text, std::move(awaited));
    }
    std::lock_guard lock(process().mutex);
    process().init_limit.swap(limit);
  });
}

FARANDOLE_API int32_t farandole_start_timeline(const char* path, int32_t mark_cycles) {
  return guarded([&] { runtime()->watch().start_timeline(path, mark_cycles != 0); });
}

FARANDOLE_API int32_t farandole_stop_timeline(void) {
  return guarded([&] { runtime()->watch().recorder().timeline().stop(); });
}
