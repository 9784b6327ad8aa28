// SPDX-License-Identifier: Apache-2.0
// Handles that callers hold while their calls are in flight, and the outcomes of these calls.
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

// Frees host memory at once. Frees GPU memory after the work that is now queued in the core's stream.
struct FreeMemory {
  std::shared_ptr<GpuDevice> device;
  void operator()(std::byte* memory) const;
};
using OwnedMemory = std::unique_ptr<std::byte, FreeMemory>;
// Throws Error(kLibrary), whose text contains the number of bytes.
OwnedMemory allocate(size_t bytes, const std::shared_ptr<GpuDevice>& device = nullptr);

struct Outcome {
  Failure failure;
  std::byte* output = nullptr;
  OwnedMemory owned;  // set if the core allocated the output
  bool absent = false;
  Dimensions shape;
  std::vector<int64_t> received;  // see farandole_result
  int64_t value = 0;
  std::shared_ptr<GpuEvent> past;  // set for a launched GPU call; fires when the result is complete
};

// Computes a call's Part::rows from the rows in the log entry.
std::vector<int64_t> rows_of(std::span<const int64_t> logged, const Signature& signature,
                             int members);

// Makes one member's outcome, including its shape and memory. `rows` is the result of rows_of(). `shape` is the input's
// shape. If `output` is null, allocates the result's memory.
Outcome outcome_of(const Signature& signature, const std::vector<int64_t>& rows, int member,
                   int members, Dimensions shape, std::byte* output,
                   const std::shared_ptr<GpuDevice>& device);

// The table of handles. May be used from any thread. Functions throw Error(kInvalidArgument) for unknown handles.
//
// States of a handle: free -> under way (create) -> done (finish_all, fail_all) -> free (release). A GPU call is
// launched (launch) before it is done. From then on, waiters return, but the buffers stay in use.
class Handles {
 public:
  // `label` is the call's name in the flight recorder.
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
  bool done(Handle handle);        // true if the call is done or launched
  bool settled(Handle handle);     // true if the call's buffers are no longer in use
  bool unlaunched(Handle handle);  // true for a GPU call in flight that has not been launched
  // Returns true if all the calls are done, or if one of them has failed. In the second case, sets `failure`. Advances
  // `ready`, the number of calls at the front that are done.
  bool finished(std::span<const Handle> handles, size_t& ready, Failure& failure);
  // Calls visit(const Outcome&) under the lock. Throws if the call is neither done nor launched.
  template <class Visitor>
  void look(Handle handle, Visitor&& visit) {
    std::lock_guard lock(mutex_);
    visit(outcome_of(handle));
  }
  // Throws the call's failure, or Error(kInvalidArgument) if the core does not own the result's memory.
  OwnedMemory take(Handle handle);
  // Releases a handle. If the call is in flight, its slot is freed when the call is done.
  void release(Handle handle);
  // Frees a handle in any state. The handle must not have been returned to a user.
  void cancel(Handle handle);
  // Releases all these handles. Ignores unknown handles.
  void release_all(std::span<const Handle> handles);

  // For callers that wait while another thread is the driver. wait() sleeps until a handle has finished since prepare()
  // was called, or until the deadline. Returns false if a signal came.
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
  Slot* find(Handle handle);  // null if the handle is unknown
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
