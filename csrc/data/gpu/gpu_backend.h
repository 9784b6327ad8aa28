// SPDX-License-Identifier: Apache-2.0
// The interface of backends for GPU memory. step() returns kFinished when all of a bucket's work is in the device's
// stream; the bucket is done when the GPU has executed that work.
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

// The work of a launched bucket.
struct GpuWork {
  std::shared_ptr<GpuEvent> past;                   // fires when the bucket is done
  std::vector<std::shared_ptr<PinnedMemory>> keep;  // memory that the work uses
};

class GpuBackend : public Backend {
 public:
  explicit GpuBackend(std::shared_ptr<GpuDevice> device) : device_(std::move(device)) {}

  // The lowest member's first call returns the key that all members pass to connect(). All other calls return nullopt.
  virtual std::optional<std::string> new_key() { return std::nullopt; }
  virtual void connect(const std::string&) {}
  // Returns the bucket's work. Must be called once, after step() has returned kFinished.
  GpuWork take_work() { return std::move(work_); }
  // Throws Error(kLibrary) if launched work may never end, because NCCL or the GPU has failed or a deadline has passed.
  virtual void check() const = 0;
  virtual bool failed() const = 0;  // true if check() would throw
  // Must be called when the oldest launched bucket is done.
  virtual void finished() = 0;
  // Blocks, for at most a few seconds, until no work in the stream writes to buffers. Call this after abort().
  void synchronize() const noexcept { device_->synchronize(); }

 protected:
  // Call this when all of the bucket's work is in the stream.
  Progress finish() {
    work_.past = device_->recorded(device_->stream());
    parts_ = {};
    return Progress::kFinished;
  }

  const std::shared_ptr<GpuDevice> device_;
  std::span<const Part> parts_;  // parts of the bucket that is being launched
  GpuWork work_;
};

}  // namespace farandole
