// SPDX-License-Identifier: Apache-2.0
// One GPU that this rank uses: its primary context, the core's stream, and pools of events and memory. All functions
// may be called from any thread.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/clock.h"
#include "lib/gpu/cuda.h"

namespace farandole {

class GpuDevice;

// A point in the work of a stream. The destructor returns the CUDA event to the device's pool.
class GpuEvent {
 public:
  GpuEvent(std::shared_ptr<GpuDevice> device, cuda::Event event)
      : device_(std::move(device)), event_(event) {}
  ~GpuEvent();
  GpuEvent(const GpuEvent&) = delete;
  GpuEvent& operator=(const GpuEvent&) = delete;

  void record(cuda::Stream stream);
  void make_wait(cuda::Stream stream) const;  // makes later work in `stream` wait for this point
  bool fired() const;                         // throws Error(kLibrary) if the device has failed
  void wait() const;                          // sleeps until the point is reached
  bool fires_by(Deadline deadline) const;     // waits at most until the deadline

 private:
  std::shared_ptr<GpuDevice> device_;
  cuda::Event event_;
};

// Pinned host memory. The destructor returns the memory to the device's pool.
class PinnedMemory {
 public:
  PinnedMemory(std::shared_ptr<GpuDevice> device, std::byte* data, size_t bytes)
      : device_(std::move(device)), data_(data), bytes_(bytes) {}
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  std::byte* data() const { return data_; }

 private:
  std::shared_ptr<GpuDevice> device_;
  std::byte* data_;
  size_t bytes_;
};

class GpuDevice : public std::enable_shared_from_this<GpuDevice> {
 public:
  static std::shared_ptr<GpuDevice> open(std::shared_ptr<const cuda::Api> api, int ordinal);
  ~GpuDevice();

  // Makes the device's context current in this thread. Also allows this thread to make calls that another thread's
  // capture would otherwise forbid. Does not throw: if the context is gone, the CUDA calls in the scope fail.
  class Scope {
   public:
    explicit Scope(const GpuDevice& device);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const GpuDevice& device_;
    const bool entered_;
    int capture_mode_ = cuda::kCaptureRelaxed;  // exchanged for the thread's mode
  };

  const cuda::Api& api() const { return *api_; }
  int ordinal() const { return ordinal_; }
  int capability() const { return capability_; }  // compute capability; 90 means sm_90
  const cuda::Uuid& uuid() const { return uuid_; }
  std::string name() const;
  // The core's stream. It has high priority and does not synchronise with the default stream.
  cuda::Stream stream() const { return stream_; }

  // Waits at most 5 seconds for the work that is now in stream(). The wait is shorter if the kernels are aborted.
  void synchronize() noexcept;

  std::shared_ptr<GpuEvent> event();
  std::shared_ptr<GpuEvent> recorded(cuda::Stream stream);
  std::shared_ptr<PinnedMemory> pinned(size_t bytes);
  // Allocates memory for later work in `stream`. On failure, throws Error(kLibrary) with the number of bytes.
  cuda::Address allocate(size_t bytes, cuda::Stream stream);
  // Frees memory after the work that is now in `stream`. Returns false, and frees nothing, if it is being captured.
  bool free(cuda::Address address, cuda::Stream stream) noexcept;
  // Keeps the module until the device is destroyed. Unloading waits for the module's work, which may never end.
  void unload_at_end(cuda::Module module);
  // Also returns true for the default stream while CUDA forbids its use because a stream that synchronises with it is
  // captured.
  bool is_capturing(cuda::Stream stream) const noexcept;

 private:
  friend class GpuEvent;
  friend class PinnedMemory;
  GpuDevice(std::shared_ptr<const cuda::Api> api, int ordinal);

  std::shared_ptr<const cuda::Api> api_;
  const int ordinal_;
  cuda::Device device_ = 0;
  cuda::Context context_ = nullptr;
  cuda::Stream stream_ = nullptr;
  cuda::Pool pool_ = nullptr;
  cuda::Uuid uuid_{};
  int capability_ = 0;

  std::mutex mutex_;
  std::vector<cuda::Event> events_;
  std::vector<cuda::Module> modules_;
  std::multimap<size_t, std::byte*> pinned_;  // by number of bytes
};

}  // namespace farandole
