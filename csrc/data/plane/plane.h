// SPDX-License-Identifier: Apache-2.0
// The seam between what is reduced and how bytes move. One Plane serves one process set on one kind
// of memory; all members feed it the same buckets in the same order (the log's).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/types.h"

namespace farandole {

class GpuEvent;

// One tensor of a bucket, as this rank sees it. "Member" is an index into the process set.
struct Part {
  Signature signature;               // root is a member index here; shape is this rank's own
  const std::byte* input = nullptr;  // nullptr: this rank contributes the identity (no rows)
  std::byte* output = nullptr;       // nullptr: the result is dropped
  std::vector<bool> present;         // which members have an input; empty: all
  // As CollectiveTraits::rows says.
  std::vector<int64_t> rows;
  int64_t divisor = 1;                 // Average divides by it
  std::shared_ptr<GpuEvent> produced;  // the buffers are on a GPU, and free for us from here on

  bool has(int member) const { return present.empty() || present[static_cast<size_t>(member)]; }
};

enum class Progress {
  kWaiting,  // nothing to do before a peer moves; that peer will ring our bell, or see look_again()
  kMoved,    // some bytes moved; there may be more at once
  kFinished,  // the bucket is done: no peer reads or writes its buffers again
};

class Plane {
 public:
  virtual ~Plane() = default;
  virtual const char* name() const = 0;
  // Whether this plane can carry out such a request; asked before submission.
  virtual bool supports(const Signature& signature) const = 0;
  // Starts the next bucket; the one before is finished. `parts` stay valid until kFinished or abort.
  virtual void begin(std::span<const Part> parts) = 0;
  // Moves at most one block; never blocks. Only between begin and kFinished.
  virtual Progress step() = 0;
  // Whether step() would move: the engine's last look before it sleeps. No side effects.
  virtual bool ready() const = 0;
  // When to call step() again though no bell has rung: only what rings none has such a time.
  virtual Deadline look_again() const { return Deadline::never(); }
  // Drops the bucket in flight. Afterwards no peer touches our buffers and step() is not called.
  virtual void abort() = 0;
};

}  // namespace farandole
