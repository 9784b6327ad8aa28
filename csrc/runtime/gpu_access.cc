// SPDX-License-Identifier: Apache-2.0
#include "runtime/gpu_access.h"

#include <map>

#include "base/abi.h"
#include "base/error.h"

namespace farandole {
namespace {

cuda::Stream stream_of(uint64_t number) { return reinterpret_cast<cuda::Stream>(number); }

}  // namespace

// Takes about a second, since it compiles the kernels; only other threads that submit GPU tensors wait for
// its lock.
std::shared_ptr<GpuDevice> GpuAccess::open(int ordinal) {
  std::lock_guard lock(mutex_);
  if (!gpu_) {
    auto gpu = std::make_unique<RankGpu>(config_, ordinal, ring_);
    announce_(*gpu);
    gpu_ = std::move(gpu);
  }
  if (gpu_->ordinal() == ordinal) return gpu_->device();
  throw Error(ErrorCode::kInvalidArgument,
              "a tensor on GPU " + std::to_string(ordinal) + ", but this rank's first was on GPU " +
                  std::to_string(gpu_->ordinal()) +
                  ": a rank uses one GPU. Choose it before the first call: "
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
                "an array without elements does not say on which GPU it lies, and this rank has "
                "used none yet");
  }
  if (!driver_) driver_ = cuda::open(config_.cuda_library);
  int ordinal = 0;
  driver_->check(driver_->pointer_attribute(&ordinal, cuda::kPointerOrdinal, address),
                 "cuPointerGetAttribute: this is not GPU memory");
  return ordinal;
}

const GpuAdasum& GpuAccess::adasum(int ordinal) {
  open(ordinal);
  return gpu_->adasum();
}

std::shared_ptr<GpuWindow> GpuAccess::open_window(int ordinal, SetId set, size_t bytes) {
  open(ordinal);
  return gpu_->open_window(set, bytes);
}

// Checked here because a bucket in flight must find its windows.
WindowRange GpuAccess::window_range_of(const Request& request) const {
  constexpr uint64_t kAlignment = 16;
  WindowRange range = request.signature.window_range;
  if (range.window == 0) return range;
  const std::shared_ptr<GpuWindow> window = gpu_->windows().find(request.set, range.window);
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorCode::kInvalidArgument,
                "'" + request.name + "': window " + std::to_string(range.window) + " " + why);
  };
  if (!window) {
    refuse(
        "is not open: it was closed, belongs to another process set, or is of the time before the "
        "last init()");
  }
  range.window_bytes = window->bytes();
  const uint64_t bytes = request.signature.bytes();
  if (range.offset % kAlignment != 0) refuse("has places at multiples of 16 bytes only");
  if (bytes > range.window_bytes || range.offset > range.window_bytes - bytes) {
    refuse("has " + std::to_string(range.window_bytes) + " bytes: byte " +
           std::to_string(range.offset) + " is no place for " + std::to_string(bytes));
  }
  return range;
}

std::shared_ptr<GpuEvent> GpuAccess::event_in(uint64_t stream, bool has_place) const {
  GpuDevice& device = *gpu_->device();
  if (device.is_capturing(stream_of(stream))) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "the current stream is being captured into a CUDA graph; a negotiated call can't be "
        "part of a graph: call it before or after the captured step (a backward pass is "
        "captured in optimizer.no_sync(), and optimizer.step() called outside)");
  }
  std::shared_ptr<GpuEvent> event = device.recorded(stream_of(stream));
  if (has_place) gpu_->windows().use(stream_of(stream));
  return event;
}

void GpuAccess::mark_produced(std::span<CheckedCall> calls) const {
  std::map<std::pair<uint64_t, bool>, std::shared_ptr<GpuEvent>> events;
  for (CheckedCall& call : calls) {
    Submission& one = call.submission;
    if (one.device == kCpuDevice) continue;
    const bool has_place = call.request.signature.window_range.window != 0;
    std::shared_ptr<GpuEvent>& event = events[{one.stream, has_place}];
    if (!event) event = event_in(one.stream, has_place);
    one.produced = event;
  }
}

void GpuAccess::join_stream(std::span<const Handle> handles, uint64_t stream) {
  std::map<const GpuEvent*, std::shared_ptr<GpuEvent>> events;
  bool had_place = false;
  for (Handle handle : handles) {
    handles_.look(handle, [&](const Outcome& outcome) {
      if (outcome.past) events[outcome.past.get()] = outcome.past;
      had_place |= outcome.had_place;
    });
  }
  for (auto& [key, event] : events) event->make_wait(stream_of(stream));
  if (had_place && !events.empty()) gpu_->windows().use(stream_of(stream));
}

}  // namespace farandole
