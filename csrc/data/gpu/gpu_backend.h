// SPDX-License-Identifier: Apache-2.0
// Interface of backends on GPU memory. A bucket is finished when it is in our stream, and done when that has passed it.
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

// A launched bucket, until the stream has passed it.
struct GpuWork {
  std::shared_ptr<GpuEvent> past;
  std::vector<std::shared_ptr<PinnedMemory>> keep;  // memory that the stream uses until then
};

class GpuBackend : public Backend {
 public:
  explicit GpuBackend(std::shared_ptr<GpuDevice> device) : device_(std::move(device)) {}

  // Lowest member, once: the key by which all members' connect() find each other. Not all backends have one.
  virtual std::optional<std::string> new_key() { return std::nullopt; }
  virtual void connect(const std::string&) {}
  // Call it once after step() has returned kFinished: that bucket's work.
  GpuWork take_work() { return std::move(work_); }
  // Called between buckets. Throws Error(kLibrary) if launched work may never end: NCCL found an error, or time is up.
  virtual void check() const = 0;
  virtual bool failed() const = 0;  // true if check() would throw
  // The oldest launched bucket is done.
  virtual void finished() = 0;
  // After abort(): blocks for at most a few seconds, until none of our work writes to buffers.
  void synchronize() const noexcept { device_->synchronize(); }

 protected:
  // The whole bucket is in our stream.
  Progress finish() {
    work_.past = device_->recorded(device_->stream());
    parts_ = {};
    return Progress::kFinished;
  }

  const std::shared_ptr<GpuDevice> device_;
  std::span<const Part> parts_;  // the bucket under way
  GpuWork work_;
};

}  // namespace farandole
