// SPDX-License-Identifier: Apache-2.0
#include "runtime/gpu_access.h"

#include <map>

#include "base/abi.h"
#include "base/error.h"

namespace farandole {
namespace {

cuda::Stream stream_of(uint64_t number) { return reinterpret_cast<cuda::Stream>(number); }

}  // namespace

// Holds the lock while it compiles kernels (about a second). Only threads that submit GPU tensors wait for the lock.
std::shared_ptr<GpuDevice> GpuAccess::open(int ordinal) {
  std::lock_guard lock(mutex_);
  if (!gpu_) {
    auto gpu = std::make_unique<RankGpu>(config_, ordinal, ring_);
    announce_(*gpu);
    gpu_ = std::move(gpu);
  }
  if (gpu_->ordinal() == ordinal) return gpu_->device();
  throw Error(ErrorCode::kInvalidArgument,
              "a tensor is on GPU " + std::to_string(ordinal) +
                  ", but this rank's first was on GPU " + std::to_string(gpu_->ordinal()) +
                  ": a rank uses one GPU. Choose the GPU before the first call: "
                  "torch.cuda.set_device(farandole.local_rank()), or for JAX "
                  "jax.config.update('jax_cuda_visible_devices', str(farandole.local_rank()))");
}

void GpuAccess::open(std::span<const farandole_request> requests) {
  for (const farandole_request& request : requests) {
    if (request.device >= 0) open(request.device);
  }
}

int GpuAccess::device_of(uint64_t address) {
  std::lock_guard lock(mutex_);
  if (address == 0) {
    if (gpu_) return gpu_->ordinal();
    throw Error(ErrorCode::kInvalidArgument,
                "the GPU of an array without elements is unknown until this rank has used a GPU; "
                "make a call with a nonempty array first");
  }
  if (!driver_) driver_ = cuda::open(config_.cuda_library);
  int ordinal = 0;
  driver_->check(driver_->pointer_attribute(&ordinal, cuda::kPointerOrdinal, address),
                 "cuPointerGetAttribute: this is not GPU memory");
  return ordinal;
}

std::shared_ptr<GpuEvent> GpuAccess::event_in(uint64_t stream) const {
  GpuDevice& device = *gpu_->device();
  if (device.is_capturing(stream_of(stream))) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "the current stream is being captured into a CUDA graph, and a negotiated call can't be "
        "part of a graph; make it before or after the capture (to capture a backward pass, use "
        "optimizer.no_sync(), and call optimizer.step() outside of the capture)");
  }
  return device.recorded(stream_of(stream));
}

std::vector<std::shared_ptr<GpuEvent>> GpuAccess::events_in(
    std::span<const uint64_t> streams) const {
  std::vector<std::shared_ptr<GpuEvent>> events;
  for (size_t i = 0; i < streams.size(); ++i) {
    const bool same = i > 0 && streams[i] == streams[i - 1];
    events.push_back(same ? events.back() : event_in(streams[i]));
  }
  return events;
}

void GpuAccess::join_stream(std::span<const Handle> handles, uint64_t stream) {
  std::map<const GpuEvent*, std::shared_ptr<GpuEvent>> events;
  for (Handle handle : handles) {
    handles_.look(handle, [&](const Outcome& outcome) {
      if (outcome.past) events[outcome.past.get()] = outcome.past;
    });
  }
  for (auto& [key, event] : events) event->make_wait(stream_of(stream));
}

}  // namespace farandole
