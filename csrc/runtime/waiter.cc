// SPDX-License-Identifier: Apache-2.0
#include "runtime/waiter.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/error.h"
#include "base/logging.h"

namespace farandole {
namespace {

constexpr std::chrono::milliseconds kFirstProbe{100};  // before a wait thinks of its leader

// Records how long a caller blocks; a wait that was interrupted and repeated counts once.
struct Waiting {
  Recorder& recorder;
  bool over = true;
  Waiting(Recorder& its_recorder, Handle first, uint32_t name) : recorder(its_recorder) {
    recorder.wait_begins(first, name);
  }
  ~Waiting() { recorder.wait_ends(over); }
};

// With FARANDOLE_GPU_ORDER=program, GPU buckets are launched only while somebody waits for them.
struct Wanted {
  GpuBuckets& gpu;
  std::span<const Handle> handles;
  Wanted(GpuBuckets& its_gpu, std::span<const Handle> its_handles)
      : gpu(its_gpu), handles(its_handles) {
    gpu.want(handles);
  }
  ~Wanted() { gpu.unwant(handles); }
};

}  // namespace

// A stopped leader can't report itself, so its waiting ranks have to notice.
void Waiter::look_at_leader() {
  const StoppedProcess::Verdict verdict = watch_.leader_process().look();
  if (verdict == StoppedProcess::Verdict::kMoves) return;
  const std::string text = watch_.leader_process().text();
  if (verdict == StoppedProcess::Verdict::kWarn)
    return log(LogLevel::kWarning, "no progress: " + text);
  give_up({ErrorCode::kStall, "no progress: " + text + " (FARANDOLE_STALL_ABORT sets this limit)"});
}

void Waiter::give_up(Failure failure) {
  calls_.report(Leave{true, failure.text});  // for when the leader runs again
  calls_.job.fail(std::move(failure));
  driver_.ring();
}

// No process of another host is in sight, and its kernel answers for it as long as it only stands still.
Deadline Waiter::probe_job_leader(Handle handle) {
  const Deadline until = watch_.job_leader_answers();
  uint64_t asked = 0;
  {
    std::lock_guard lock(probes_mutex_);
    const auto [at, is_new] = probes_.try_emplace(handle, Probe{until});
    has_probes_ = true;
    if (is_new || !at->second.until.expired()) return at->second.until;
    at->second.until = until;
    asked = std::exchange(at->second.number, 0);
  }
  if (asked == 0) {
    const uint64_t number = inquire(handle);
    std::lock_guard lock(probes_mutex_);
    if (const auto at = probes_.find(handle); at != probes_.end()) at->second.number = number;
    return until;
  }
  std::unique_lock lock(calls_.mutex);
  const bool answered = calls_.questions.take(asked).has_value();
  lock.unlock();
  if (!answered) give_up(watch_.job_leader_silent());
  return until;
}

void Waiter::forget_probe(Handle handle) {
  if (!has_probes_.load(std::memory_order_relaxed)) return;
  std::lock_guard lock(probes_mutex_);
  probes_.erase(handle);
  has_probes_ = !probes_.empty();
}

WaitEnd Waiter::wait(std::span<const Handle> wanted, Deadline deadline, Failure& failure) {
  size_t ready = 0;
  auto done = [&] { return calls_.handles.finished(wanted, ready, failure); };
  if (done()) return failure ? WaitEnd::kFailed : WaitEnd::kDone;
  calls_.expedite();
  const Wanted held(gpu_, wanted);
  const Handle first = wanted[ready];
  Waiting waiting(watch_.recorder(), first, calls_.handles.label_of(first));
  const bool probes = !watch_.job_leader_answers().is_never();
  Deadline probe = probes ? Deadline::in(kFirstProbe) : Deadline::never();
  for (;;) {
    const Deadline look = std::min(watch_.leader_process().next_look(), probe);
    if (driver_.await(done, std::min(deadline, look))) {
      forget_probe(first);
      return failure ? WaitEnd::kFailed : WaitEnd::kDone;
    }
    look_at_leader();
    if (probes) probe = probe_job_leader(first);
    if (!deadline.expired() && look.expired()) continue;
    waiting.over = false;
    return WaitEnd::kTimeIsUp;  // or a signal
  }
}

uint64_t Waiter::inquire(Handle handle) {
  uint64_t number = 0;
  {
    std::lock_guard lock(calls_.mutex);
    std::optional<SetId> joined = calls_.sets.joined_by(handle);
    std::optional<CallKey> key = calls_.pending.key_of(handle);
    if (!key) key = calls_.posted.key_of(handle);
    if (joined) key = CallKey{*joined, "", 0};
    if (!key) return 0;
    number = calls_.questions.ask();
    calls_.reporter.pass(Inquire{number, *key, joined.has_value()});
  }
  driver_.after_submit();
  return number;
}

std::string Waiter::explain(Handle handle, Deadline deadline) {
  const uint64_t number = inquire(handle);
  if (number == 0) return "all ranks have submitted it, and its bytes are under way";
  std::optional<std::string> text;
  auto answered = [&] {
    if (!text) {
      std::lock_guard lock(calls_.mutex);
      text = calls_.questions.take(number);
    }
    return text || calls_.job.broken();
  };
  while (!driver_.await(answered, deadline) && !deadline.expired()) {
  }
  if (text) return *text;
  if (calls_.job.broken()) return calls_.job.failure().text;
  return watch_.leader_process().stands() ? watch_.leader_process().text()
                                          : "rank 0, which leads the job, does not answer";
}

bool Waiter::done(Handle handle) {
  const bool over = calls_.handles.done(handle);
  if (!over) calls_.expedite();
  return over;
}

}  // namespace farandole
