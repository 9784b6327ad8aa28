// SPDX-License-Identifier: Apache-2.0
// Handles, which callers hold while their calls are in flight, and the outcomes of these calls.
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

// Frees host memory, or GPU memory after the work now in the core's stream.
struct FreeMemory {
  std::shared_ptr<GpuDevice> device;
  void operator()(std::byte* memory) const;
};
using OwnedMemory = std::unique_ptr<std::byte, FreeMemory>;
// Throws Error(kLibrary) with the number of bytes.
OwnedMemory allocate(size_t bytes, const std::shared_ptr<GpuDevice>& device = nullptr);

struct Outcome {
  Failure failure;
  std::byte* output = nullptr;
  OwnedMemory owned;  // set if the core allocated the output
  bool absent = false;
  Dimensions shape;
  std::vector<int64_t> received;  // see farandole_result
  int64_t value = 0;
  std::shared_ptr<GpuEvent> past;  // launched GPU call: its result is complete after this event
};

// Returns a call's Part::rows, from the rows in the log entry.
std::vector<int64_t> rows_of(std::span<const int64_t> logged, const Signature& signature,
                             int members);

// Makes one member's outcome: shape and memory. `rows`: the result of rows_of(). `shape`: the input's shape. If
// `output` is null, allocates the result's memory.
Outcome outcome_of(const Signature& signature, const std::vector<int64_t>& rows, int member,
                   int members, Dimensions shape, std::byte* output,
                   const std::shared_ptr<GpuDevice>& device);

// The table of handles. Any thread. Throws Error(kInvalidArgument) for unknown handles.
//
// States of a handle: free -> under way (create) -> done (finish_all, fail_all) -> free (release). A GPU call is
// launched (launch) before it is done: waiters then return, but the buffers stay in use.
class Handles {
 public:
  // `label`: the call's name in the flight recorder.
  Handle create(uint32_t label = 0, bool on_gpu = false);
  uint32_t label_of(Handle handle);
  // Completes calls so that waiters see them finish together. each(end) must call end(handle, outcome) for every call.
  template <class Each>
  void finish_all(Each&& each) {
    {
      std::lock_guard lock(mutex_);
      each([this](Handle handle, Outcome&& outcome) { end(handle, std::move(outcome)); });
    }
    announce();
  }
  // Marks a call as launched. A call that ends without a failure keeps this outcome.
  void launch(Handle handle, Outcome outcome);
  void fail_all(const Failure& failure);
  bool done(Handle handle);        // done or launched
  bool settled(Handle handle);     // the call's buffers are no longer in use
  bool unlaunched(Handle handle);  // a GPU call in flight that is not launched
  // True if all are done, or one has failed (then sets `failure`). Updates `ready`, the number of done calls in front.
  bool finished(std::span<const Handle> handles, size_t& ready, Failure& failure);
  // Calls visit(const Outcome&) under the lock. Throws if the call is neither done nor launched.
  template <class Visitor>
  void look(Handle handle, Visitor&& visit) {
    std::lock_guard lock(mutex_);
    visit(outcome_of(handle));
  }
  // Throws the call's failure, or Error(kInvalidArgument) if the core does not own the result's memory.
  OwnedMemory take(Handle handle);
  // If the call is in flight, its slot is freed when the call is done.
  void release(Handle handle);
  // Frees a handle in any state. No caller may have seen the handle.
  void cancel(Handle handle);
  // Ignores unknown handles.
  void release_all(std::span<const Handle> handles);

  // For callers that wait while another thread drives. wait() sleeps until a handle has finished since prepare(), or
  // until the deadline. It returns false if a signal came.
  uint32_t prepare() const { return finished_count_.load(); }
  bool wait(uint32_t ticket, Deadline deadline);
  // Wakes all waiters, even if no handle has finished.
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
