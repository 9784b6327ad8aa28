// SPDX-License-Identifier: Apache-2.0
// Gives submitting threads access to this rank's GPU. The GPU is opened when the first GPU tensor is submitted, because
// scripts choose a device only after init().
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <span>

#include "runtime/calls/request_checks.h"
#include "runtime/gpu/rank_gpu.h"

struct farandole_request;

namespace farandole {

class GpuAccess {
 public:
  // `ring` wakes the driver. open() calls `announce` once, when it opens the GPU.
  GpuAccess(const Config& config, Handles& handles, std::function<void()> ring,
            std::function<void(RankGpu&)> announce)
      : config_(config),
        handles_(handles),
        ring_(std::move(ring)),
        announce_(std::move(announce)) {}

  // Throws Error(kInvalidArgument) for a second GPU, or Error(kLibrary) if the GPU cannot be opened.
  std::shared_ptr<GpuDevice> open(int ordinal);
  // Opens the GPU that the requests name, if any.
  void open(std::span<const farandole_request> requests);
  int device_of(uint64_t address);
  // See farandole_join_stream().
  void join_stream(std::span<const Handle> handles, uint64_t stream);

  // Returns one event per stream, recorded after the work that is now queued in the stream. Equal adjacent streams
  // share an event. The GPU must be open.
  std::vector<std::shared_ptr<GpuEvent>> events_in(std::span<const uint64_t> streams) const;

 private:
  std::shared_ptr<GpuEvent> event_in(uint64_t stream) const;

  const Config& config_;
  Handles& handles_;
  const std::function<void()> ring_;
  const std::function<void(RankGpu&)> announce_;
  std::mutex mutex_;
  std::shared_ptr<const cuda::Api> driver_;  // used by device_of() before a GPU is open
  std::unique_ptr<RankGpu> gpu_;
};

}  // namespace farandole
