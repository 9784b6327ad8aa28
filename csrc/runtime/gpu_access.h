// SPDX-License-Identifier: Apache-2.0
// The GPU of this rank, as submitters see it. Opened by the first tensor there: scripts choose their device after
// init().
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <span>

#include "runtime/calls/pending.h"
#include "runtime/gpu/rank_gpu.h"

struct farandole_request;

namespace farandole {

class GpuAccess {
 public:
  // ring: the driver's bell. announce: the rank uses a GPU from here on.
  GpuAccess(const Config& config, Handles& handles, std::function<void()> ring,
            std::function<void(RankGpu&)> announce)
      : config_(config),
        handles_(handles),
        ring_(std::move(ring)),
        announce_(std::move(announce)) {}

  // Throws kInvalidArgument for another one than the first, kLibrary.
  std::shared_ptr<GpuDevice> open(int ordinal);
  // For those among the requests that name one.
  void open(std::span<const farandole_request> requests);
  int device_of(uint64_t address);
  const GpuAdasum& adasum(int ordinal);
  // As RankGpu::open_window.
  std::shared_ptr<GpuWindow> open_window(int ordinal, SetId set, size_t bytes);
  // What comes later in `stream` sees the results of these launched calls.
  void join_stream(std::span<const Handle> handles, uint64_t stream);

  // ---- of requests whose GPU is open
  Place place_of(const Request& request) const;
  void mark_produced(std::span<Submission* const> submissions) const;

 private:
  const Config& config_;
  Handles& handles_;
  const std::function<void()> ring_;
  const std::function<void(RankGpu&)> announce_;
  std::mutex mutex_;
  std::shared_ptr<const cuda::Api> driver_;  // before there is a device, to ask where memory lies
  std::unique_ptr<RankGpu> gpu_;
};

}  // namespace farandole
