// SPDX-License-Identifier: Apache-2.0
// A backend whose memory is on a GPU: a bucket is finished once it is launched into our stream, and done
// once that stream has come past it.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "data/backend/backend.h"
#include "lib/gpu/gpu_device.h"

namespace farandole {

// A launched bucket, until its point in the stream is past.
struct GpuWork {
  std::shared_ptr<GpuEvent> past;
  std::vector<std::shared_ptr<PinnedMemory>> keep;  // what the stream reads or writes until then
};

class GpuBackend : public Backend {
 public:
  explicit GpuBackend(std::shared_ptr<GpuDevice> device) : device_(std::move(device)) {}

  // On the lowest member, once: a key, by which all members' connect() find each other. Not all backends have one.
  virtual std::optional<std::string> new_key() { return std::nullopt; }
  virtual void connect(const std::string&) {}
  // Of the bucket for which step() has just said kFinished.
  GpuWork take_work() { return std::move(work_); }
  // Launched work may no longer come to its end (NCCL found an error, or time is up): throws
  // Error(kLibrary). Called between buckets.
  virtual void check() const = 0;
  virtual bool failed() const = 0;  // check() would throw
  // The oldest launched bucket has come to its end.
  virtual void finished() = 0;
  // After abort(): blocks until nothing of ours writes to buffers any more, for a few seconds at most.
  void synchronize() const noexcept { device_->synchronize(); }

 protected:
  // All of the bucket is in our stream.
  Progress finish() {
    work_.past = device_->recorded(device_->stream());
    parts_ = {};
    return Progress::kFinished;
  }

  const std::shared_ptr<GpuDevice> device_;
  std::span<const Part> parts_;  // of the bucket under way
  GpuWork work_;
};

}  // namespace farandole
