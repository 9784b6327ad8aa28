// SPDX-License-Identifier: Apache-2.0
#include "runtime/engine/finisher.h"

#include <utility>

#include "base/clock.h"

namespace farandole {

void Finisher::finish(Submission submission, Outcome outcome) {
  Ending ending{std::move(submission), std::move(outcome)};
  finish_all({&ending, 1});
}

// Under the mutex.
void Finisher::end_name(const Submission& submission) {
  if (auto refusal = calls_.pending.finish(submission)) {
    calls_.reporter.send(std::move(*refusal));
  }
}

// A name is free before its handle is done.
void Finisher::finish_all(std::span<Ending> endings) {
  {
    std::lock_guard lock(calls_.mutex);
    for (const Ending& ending : endings) {
      if (!ending.launched) end_name(ending.submission);
    }
  }
  const int64_t now = now_ns();
  for (const Ending& ending : endings) {
    if (ending.launched) continue;
    const RecordedCall& call = ending.submission.recorded;
    if (ending.outcome.failure) {
      recorder_.failed(call, ending.outcome.failure);
      tell_first(ending.outcome.failure);
    } else {
      recorder_.done(call, now);
    }
  }
  calls_.handles.finish_all([&](auto&& end) {
    for (Ending& ending : endings) {
      if (!ending.launched) end(ending.submission.handle, std::move(ending.outcome));
    }
  });
}

void Finisher::launch(Ending& ending, const std::shared_ptr<GpuEvent>& past) {
  {
    std::lock_guard lock(calls_.mutex);
    end_name(ending.submission);
  }
  ending.launched = true;
  ending.outcome.past = past;
  calls_.handles.launch(ending.submission.handle, std::move(ending.outcome));
}

void Finisher::settle(const Ending& ending, const Failure* failure) {
  if (failure) {
    recorder_.failed(ending.submission.recorded, *failure);
    tell_first(*failure);
  } else {
    recorder_.done(ending.submission.recorded, now_ns());
  }
  calls_.handles.settle(ending.submission.handle, failure);
}

void Finisher::tell_first(const Failure& failure) {
  const bool ends_well = failure.code == ErrorCode::kShutdown;
  if (!ends_well && told_.insert(failure.code).second) on_failure_(failure);
}

}  // namespace farandole
