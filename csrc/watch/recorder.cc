// SPDX-License-Identifier: Apache-2.0
#include "watch/recorder.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>

#include "base/clock.h"
#include "base/collective.h"
#include "base/logging.h"
#include "lib/os/thread.h"
#include "watch/flight_text.h"

namespace farandole {
namespace {

constexpr std::chrono::seconds kDiskPatience{1};

uint32_t thread_number() {
  thread_local const auto number = static_cast<uint32_t>(::syscall(SYS_gettid));
  return number;
}

// The wait of the current thread. A wait that is interrupted and repeated counts once.
struct OpenWait {
  int64_t call = 0;
  uint32_t name = kNoLabel;
  int64_t begun_ns = 0;
};
thread_local OpenWait open_wait;

FlightEvent event_of(EventKind kind, const RecordedCall& call) {
  return {.call = call.call,
          .bytes = call.bytes,
          .bucket = call.bucket,
          .name = call.name,
          .set = call.set,
          .kind = kind,
          .op = static_cast<uint8_t>(call.op),
          .dtype = static_cast<uint8_t>(call.dtype)};
}

}  // namespace

Recorder::Recorder(FlightMemory memory, int local, FlightPage::Identity identity,
                   std::string folder)
    : memory_(memory),
      local_(local),
      folder_(std::move(folder)),
      page_(memory.page(local)),
      tally_(page_.tally),
      labels_(page_.labels),
      timeline_(page_) {
  page_.identity.write(0, identity);
}

void Recorder::record(FlightEvent event) {
  if (event.time_ns == 0) event.time_ns = now_ns();
  event.thread = thread_number();
  const uint64_t number = page_.recorded.fetch_add(1, std::memory_order_relaxed);
  if (!page_.events[number % FlightPage::kEvents].write(number, event, event.bytes_used())) {
    page_.dropped.fetch_add(1, std::memory_order_relaxed);
  }
  if (timeline_.listens()) timeline_.add(event);
}

// open() must not be called from two threads at a time, but any thread may free a place.
size_t Recorder::open(const FlightEvent& submit) {
  size_t place = 0;
  for (std::atomic<uint64_t>& word : places_) {
    const int free = std::countr_one(word.load(std::memory_order_acquire));
    place += static_cast<size_t>(free);
    if (free == 64) continue;
    word.fetch_or(uint64_t{1} << free, std::memory_order_relaxed);
    const size_t used = offsetof(OpenCall, submit) + submit.bytes_used();
    page_.open_calls[place].write(open_writes_.fetch_add(1, std::memory_order_relaxed),
                                  {.submit = submit}, used);
    page_.open[place].store(submit.call, std::memory_order_release);
    break;
  }
  return place;
}

void Recorder::close(const RecordedCall& call) {
  if (call.place >= FlightPage::kOpen) return;
  int64_t open = call.call;
  if (!page_.open[call.place].compare_exchange_strong(open, 0)) return;  // it was closed already
  places_[call.place / 64].fetch_and(~(uint64_t{1} << call.place % 64), std::memory_order_release);
}

void Recorder::submitted(RecordedCall& call, uint64_t sequence, std::span<const int64_t> shape) {
  FlightEvent event = event_of(EventKind::kSubmit, call);
  event.time_ns = call.submitted_ns = now_ns();
  event.sequence = sequence;
  event.site = call.site;
  if (traits_of(call.op).paired()) {
    event.value = call.peer;
    event.bucket = static_cast<uint64_t>(call.tag);
  }
  event.dimensions = static_cast<uint8_t>(std::min<size_t>(shape.size(), UINT8_MAX));
  std::copy_n(shape.begin(), std::min(shape.size(), kRecordedDimensions), event.shape);
  record(event);
  call.place = open(event);
  tally_.submitted.fetch_add(1, std::memory_order_relaxed);
}

void Recorder::negotiated(RecordedCall& call, uint64_t bucket, uint64_t log_position,
                          int64_t time_ns) {
  call.bucket = bucket;
  FlightEvent event = event_of(EventKind::kNegotiated, call);
  event.time_ns = time_ns;
  event.sequence = log_position;
  record(event);
  if (call.place < FlightPage::kOpen) {
    page_.open_calls[call.place].write(open_writes_.fetch_add(1, std::memory_order_relaxed),
                                       {log_position, bucket, time_ns, call.set, {}},
                                       offsetof(OpenCall, submit));
  }
  const int64_t took = event.time_ns - call.submitted_ns;
  tally_.negotiation_ns.add(static_cast<uint64_t>(std::max<int64_t>(took, 0)));
}

void Recorder::done(const RecordedCall& call, int64_t time_ns) {
  FlightEvent event = event_of(EventKind::kDone, call);
  event.time_ns = time_ns;
  record(event);
  close(call);
  tally_.done.fetch_add(1, std::memory_order_relaxed);
  tally_.bytes.fetch_add(call.bytes, std::memory_order_relaxed);
}

void Recorder::failed(const RecordedCall& call, const Failure& failure) {
  FlightEvent event = event_of(EventKind::kError, call);
  event.value = static_cast<int64_t>(failure.code);
  record(event);
  close(call);
  keep_failure(failure);
  tally_.failed.fetch_add(1, std::memory_order_relaxed);
}

int64_t Recorder::launched(SetId set, uint64_t bucket, size_t tensors, uint64_t bytes) {
  const int64_t now = now_ns();
  record({.time_ns = now,
          .bytes = bytes,
          .bucket = bucket,
          .value = static_cast<int64_t>(tensors),
          .set = set,
          .kind = EventKind::kLaunched});
  tally_.moving_since_ns.store(now, std::memory_order_relaxed);
  return now;
}

void Recorder::moved(SetId set, uint64_t bucket, uint64_t bytes, int64_t launched_ns) {
  const int64_t now = now_ns(), moved_ns = now - launched_ns;
  record({.time_ns = now,
          .bytes = bytes,
          .bucket = bucket,
          .value = moved_ns,
          .set = set,
          .kind = EventKind::kDone});
  const auto took = static_cast<uint64_t>(std::max<int64_t>(moved_ns, 1));
  tally_.moving_since_ns.store(0, std::memory_order_relaxed);
  tally_.moving_ns.fetch_add(took, std::memory_order_relaxed);
  tally_.buckets.fetch_add(1, std::memory_order_relaxed);
  tally_.bucket_bytes.add(bytes);
  tally_.bandwidth.add(bytes * 1000 / took);
}

// Dumps once per error code, because the first failure may explain later ones, and a script may handle many failures.
void Recorder::keep_failure(const Failure& failure) {
  FlightFailure stored{};
  stored.code = static_cast<int32_t>(failure.code);
  const size_t length = std::min(failure.text.size(), FlightFailure::kTextBytes);
  stored.length = static_cast<uint32_t>(length);
  std::memcpy(stored.text, failure.text.data(), length);
  page_.failure.write(failures_.fetch_add(1, std::memory_order_relaxed), stored);
  const uint64_t bit = uint64_t{1} << static_cast<unsigned>(failure.code);
  const bool ends_well = failure.code == ErrorCode::kShutdown;
  if (!ends_well && (dumped_.fetch_or(bit) & bit) == 0) dump_own(failure.text);
}

void Recorder::job_failed(const Failure& failure) {
  record({.value = static_cast<int64_t>(failure.code), .kind = EventKind::kError});
  if (failure.code != ErrorCode::kShutdown) page_.state = LifeState::kFailed;
  keep_failure(failure);
}

void Recorder::tell(Stamped<FlightText>& lines, const std::string& text,
                    const std::string& reason) {
  {
    std::lock_guard lock(lines_mutex_);
    add_line(lines, text);
  }
  dump({&local_, 1}, reason);
}

void Recorder::dump(std::span<const int> locals, const std::string& reason) {
  if (folder_.empty()) return;
  {
    std::lock_guard lock(abandoned_mutex_);
    if (!abandoned_.expired()) return;
  }
  try {
    const auto dumps =
        std::make_shared<const std::vector<FlightDump>>(dumps_of(memory_, locals, reason));
    LeavableThread writer("farandole-dump", [folder = folder_, dumps] {
      try {
        write_dumps(*dumps, folder);
      } catch (const std::exception& error) {
        log(LogLevel::kWarning, std::string("no flight recorder dump: ") + error.what());
      }
    });
    // The driver waits here. A hanging disk therefore delays errors and other calls by kDiskPatience, but not longer.
    if (writer.join_or_leave(Deadline::in(kDiskPatience))) return;
    {
      std::lock_guard lock(abandoned_mutex_);
      abandoned_ = dumps;
    }
    log(LogLevel::kWarning,
        "no flight recorder dumps while " + folder_ + " hangs: a dump there takes more than 1 s");
  } catch (const std::exception& error) {
    log(LogLevel::kWarning, std::string("can't dump flight recorders: ") + error.what());
  }
}

void Recorder::dump_host(const std::string& reason) {
  dump(numbers_below(memory_.local_ranks()), reason);
}

// Dumps this rank's recorder. The first living rank of the host also dumps the recorders of dead ranks.
void Recorder::dump_own(const std::string& reason) {
  std::vector<int> locals;
  bool first = true;
  for (int local = 0; local < memory_.local_ranks(); ++local) {
    const bool died = memory_.page(local).state == LifeState::kDied;
    if (died || local == local_) locals.push_back(local);
    if (!died && local < local_) first = false;
  }
  if (!first) locals = {local_};
  dump(locals, reason);
}

void Recorder::peer_died(Rank rank, int its_local) {
  record({.value = rank, .kind = EventKind::kPeerDied});
  LifeState running = LifeState::kRunning;  // a rank that has left stays kLeft
  memory_.page(its_local).state.compare_exchange_strong(running, LifeState::kDied);
}

void Recorder::left() {
  LifeState running = LifeState::kRunning;
  page_.state.compare_exchange_strong(running, LifeState::kLeft);
}

void Recorder::late(Rank rank, int64_t ns) {
  Lateness& lateness = memory_.lateness(rank);
  lateness.times.fetch_add(1, std::memory_order_relaxed);
  lateness.ns.fetch_add(static_cast<uint64_t>(std::max<int64_t>(ns, 0)), std::memory_order_relaxed);
}

void Recorder::wait_begins(int64_t call, uint32_t name) {
  if (open_wait.call != call || open_wait.begun_ns == 0) open_wait = {call, name, now_ns()};
  if (tally_.waiters.fetch_add(1, std::memory_order_relaxed) > 0) return;
  tally_.waiting_for.store(name, std::memory_order_relaxed);
  tally_.waiting_since_ns.store(open_wait.begun_ns, std::memory_order_relaxed);
}

void Recorder::wait_ends(bool over) {
  if (tally_.waiters.fetch_sub(1, std::memory_order_relaxed) == 1 && over) {
    tally_.waiting_since_ns.store(0, std::memory_order_relaxed);
  }
  if (!over) return;
  const int64_t took = now_ns() - open_wait.begun_ns;
  tally_.wait_ns.add(static_cast<uint64_t>(std::max<int64_t>(took, 0)));
  if (timeline_.listens()) {
    timeline_.add({.time_ns = open_wait.begun_ns,
                   .value = took,
                   .name = open_wait.name,
                   .thread = thread_number(),
                   .kind = EventKind::kWait});
  }
  open_wait = {};
}

void Recorder::worked(EventKind phase, SetId set, int64_t begin_ns, int64_t end_ns) {
  timeline_.add({.time_ns = begin_ns,
                 .value = end_ns - begin_ns,
                 .set = set,
                 .thread = thread_number(),
                 .kind = phase});
}

void Recorder::cycle() {
  if (!timeline_.marks_cycles()) return;
  timeline_.add({.time_ns = now_ns(), .thread = thread_number(), .kind = EventKind::kCycle});
}

void Recorder::open_set(SetId set, const std::vector<Rank>& ranks) {
  std::string text;
  for (Rank rank : ranks) text += (text.empty() ? "" : ",") + std::to_string(rank);
  const uint64_t entry = uint64_t{static_cast<uint32_t>(set)} << 32 | label_of(text);
  for (auto& slot : page_.sets) {
    if (slot.load(std::memory_order_relaxed) != 0) continue;
    slot.store(entry, std::memory_order_release);
    return;
  }
}

void Recorder::close_set(SetId set) {
  for (auto& slot : page_.sets) {
    const uint64_t entry = slot.load(std::memory_order_relaxed);
    if (static_cast<SetId>(entry >> 32) == set) slot.store(0);
  }
}

}  // namespace farandole
