// SPDX-License-Identifier: Apache-2.0
// Handles, which a caller holds while its call is in flight, and the outcome that it finds there afterwards.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/types.h"

namespace farandole {

class GpuDevice;
class GpuEvent;

using Handle = int64_t;  // positive; never reused

// Frees host memory, or GPU memory in the order of the core's stream.
struct FreeMemory {
  std::shared_ptr<GpuDevice> device;
  void operator()(std::byte* memory) const;
};
using OwnedMemory = std::unique_ptr<std::byte, FreeMemory>;
// Throws Error(kLibrary) naming the number of bytes.
OwnedMemory allocate(size_t bytes, const std::shared_ptr<GpuDevice>& device = nullptr);

struct Outcome {
  Failure failure;
  std::byte* output = nullptr;
  OwnedMemory owned;  // if the core had to allocate the output
  bool absent = false;
  Dimensions shape;
  std::vector<int64_t> received;  // as in farandole_result
  int64_t value = 0;
  std::shared_ptr<GpuEvent> past;  // launched on a GPU: complete after this event of our stream
};

// The rows of a call, as Part::rows, from those in its log entry.
std::vector<int64_t> rows_of(std::span<const int64_t> logged, const Signature& signature,
                             int members);

// Shape and memory of a call's result, for the member of a set. `rows`: from rows_of(). `shape`: of the input;
// `output`: null: to be allocated, where the result's size was unknown.
Outcome outcome_of(const Signature& signature, const std::vector<int64_t>& rows, int member,
                   int members, Dimensions shape, std::byte* output,
                   const std::shared_ptr<GpuDevice>& device);

// The table of handles. Any thread. Unknown handles throw Error(kInvalidArgument).
class Handles {
 public:
  // `label`: the name to show while somebody waits for it.
  Handle create(uint32_t label = 0, bool on_gpu = false);
  uint32_t label_of(Handle handle);
  // Completes these, which waiters see at once: each(end) must call end(handle, outcome) for every one.
  template <class Each>
  void finish_all(Each&& each) {
    {
      std::lock_guard lock(mutex_);
      each([this](Handle handle, Outcome&& outcome) { end(handle, std::move(outcome)); });
    }
    announce();
  }
  // Launched on a GPU: waiters continue, but the buffers stay in use until it is finished, which keeps the outcome, but
  // for a failure.
  void launch(Handle handle, Outcome outcome);
  // Completes all calls in flight with this failure.
  void fail_all(const Failure& failure);
  bool done(Handle handle);        // done or launched
  bool settled(Handle handle);     // its buffers are no longer in use
  bool unlaunched(Handle handle);  // a GPU call in flight, not yet launched
  // Whether all are done, or one has failed (then `failure` is set). `ready`: how many, counted from the
  // front, are known to be done; it is increased.
  bool finished(std::span<const Handle> handles, size_t& ready, Failure& failure);
  // Calls visit(const Outcome&) under the lock. Throws if the handle is neither done nor launched.
  template <class Visitor>
  void look(Handle handle, Visitor&& visit) {
    std::lock_guard lock(mutex_);
    visit(outcome_of(handle));
  }
  // Throws the call's failure, or kInvalidArgument if the core holds no memory for it.
  OwnedMemory take(Handle handle);
  // A call in flight keeps its handle until it is done.
  void release(Handle handle);
  // Ends a handle that no caller knows, whatever became of its call.
  void cancel(Handle handle);
  // Ignores unknown handles.
  void release_all(std::span<const Handle> handles);

  // For callers that wait while another thread drives: sleeps until a handle has finished since `ticket`, a
  // signal comes, or the deadline passes.
  uint32_t prepare() const { return finished_count_.load(); }
  // False: a signal came.
  bool wait(uint32_t ticket, Deadline deadline);
  // Wakes waiters although no handle has finished, because something else has happened.
  void announce();

 private:
  enum class State { kFree, kUnderWay, kLaunched, kDone };
  struct Slot {
    State state = State::kFree;
    bool released = false;
    bool on_gpu = false;
    uint32_t generation = 0;
    uint32_t label = 0;
    Outcome outcome;
  };
  Slot* find(Handle handle);  // null: unknown
  Slot& slot_of(Handle handle);
  Outcome& outcome_of(Handle handle);
  void end(Handle handle, Outcome&& outcome);
  void let_go(Slot& slot, Handle handle);
  void free(Slot& slot, uint32_t index);

  std::mutex mutex_;
  std::deque<Slot> slots_;
  std::vector<uint32_t> free_;
  std::atomic<uint32_t> finished_count_{0};
  std::atomic<uint32_t> sleepers_{0};
};

}  // namespace farandole
