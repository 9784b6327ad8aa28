// SPDX-License-Identifier: Apache-2.0
#include "lib/gpu/gpu_device.h"

#include <bit>
#include <chrono>
#include <limits>
#include <thread>
#include <utility>

#include "base/error.h"

namespace farandole {

GpuEvent::~GpuEvent() {
  std::lock_guard lock(device_->mutex_);
  device_->events_.push_back(event_);
}

void GpuEvent::record(cuda::Stream stream) {
  GpuDevice::Scope scope(*device_);
  device_->api().check(device_->api().event_record(event_, stream), "cuEventRecord");
}

void GpuEvent::make_wait(cuda::Stream stream) const {
  GpuDevice::Scope scope(*device_);
  device_->api().check(device_->api().stream_wait(stream, event_, 0), "cuStreamWaitEvent");
}

bool GpuEvent::fired() const {
  GpuDevice::Scope scope(*device_);
  cuda::Result result = device_->api().event_query(event_);
  if (result == cuda::kNotReady) return false;
  device_->api().check(result, "GPU work failed");
  return true;
}

void GpuEvent::wait() const {
  GpuDevice::Scope scope(*device_);
  device_->api().check(device_->api().event_wait(event_), "GPU work failed");
}

bool GpuEvent::fires_by(Deadline deadline) const {
  while (!fired()) {
    if (deadline.expired()) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

PinnedMemory::~PinnedMemory() {
  std::lock_guard lock(device_->mutex_);
  device_->pinned_.emplace(bytes_, data_);
}

GpuDevice::Scope::Scope(const GpuDevice& device)
    : device_(device), entered_(device.api().context_push(device.context_) == cuda::kSuccess) {
  device.api().exchange_capture_mode(&capture_mode_);
}

GpuDevice::Scope::~Scope() {
  device_.api().exchange_capture_mode(&capture_mode_);
  cuda::Context popped;
  if (entered_) device_.api().context_pop(&popped);
}

std::shared_ptr<GpuDevice> GpuDevice::open(std::shared_ptr<const cuda::Api> api, int ordinal) {
  return std::shared_ptr<GpuDevice>(new GpuDevice(std::move(api), ordinal));
}

GpuDevice::GpuDevice(std::shared_ptr<const cuda::Api> api, int ordinal)
    : api_(std::move(api)), ordinal_(ordinal) {
  api_->check(api_->device_get(&device_, ordinal), "cuDeviceGet");
  int major = 0, minor = 0, pools = 0;
  api_->check(api_->device_attribute(&major, cuda::kComputeMajor, device_), "cuDeviceGetAttribute");
  api_->check(api_->device_attribute(&minor, cuda::kComputeMinor, device_), "cuDeviceGetAttribute");
  api_->check(api_->device_attribute(&pools, cuda::kMemoryPoolsSupported, device_),
              "cuDeviceGetAttribute");
  capability_ = 10 * major + minor;
  api_->check(api_->device_uuid(&uuid_, device_), "cuDeviceGetUuid");
  if (pools == 0) {
    throw Error(ErrorCode::kLibrary, name() +
                                         " has no stream-ordered memory pools; farandole needs a "
                                         "GPU and a driver with CUDA 11.2 or newer");
  }
  api_->check(api_->context_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
  try {
    Scope scope(*this);
    int least = 0, greatest = 0;
    api_->check(api_->stream_priorities(&least, &greatest), "cuCtxGetStreamPriorityRange");
    api_->check(api_->stream_create(&stream_, cuda::kStreamNonBlocking, greatest),
                "cuStreamCreateWithPriority");
    cuda::PoolProperties properties;
    properties.location.id = ordinal;
    api_->check(api_->pool_create(&pool_, &properties), "cuMemPoolCreate");
    // Keeps freed memory in the pool, because the CUDA driver synchronises when it allocates or returns memory.
    uint64_t keep = std::numeric_limits<uint64_t>::max();
    api_->check(api_->pool_attribute(pool_, cuda::kPoolReleaseThreshold, &keep),
                "cuMemPoolSetAttribute");
  } catch (const Error&) {
    if (stream_) api_->stream_destroy(stream_);
    api_->context_release(device_);
    throw;
  }
}

GpuDevice::~GpuDevice() {
  {
    Scope scope(*this);
    for (cuda::Module module : modules_) api_->module_unload(module);
    for (cuda::Event event : events_) api_->event_destroy(event);
    for (auto& [bytes, memory] : pinned_) api_->host_free(memory);
    api_->pool_destroy(pool_);
    api_->stream_destroy(stream_);
  }
  api_->context_release(device_);
}

std::string GpuDevice::name() const {
  char text[256] = "";
  api_->device_name(text, sizeof text, device_);
  return "GPU " + std::to_string(ordinal_) + " (" + text + ")";
}

void GpuDevice::synchronize() noexcept {
  try {
    recorded(stream_)->fires_by(Deadline::in(std::chrono::seconds{5}));
  } catch (const Error&) {  // a failed device writes to no memory
  }
}

std::shared_ptr<GpuEvent> GpuDevice::event() {
  cuda::Event event = nullptr;
  {
    std::lock_guard lock(mutex_);
    if (!events_.empty()) {
      event = events_.back();
      events_.pop_back();
    }
  }
  if (!event) {
    Scope scope(*this);
    api_->check(api_->event_create(&event, cuda::kEventBlockingSync | cuda::kEventDisableTiming),
                "cuEventCreate");
  }
  return std::make_shared<GpuEvent>(shared_from_this(), event);
}

std::shared_ptr<GpuEvent> GpuDevice::recorded(cuda::Stream stream) {
  std::shared_ptr<GpuEvent> made = event();
  made->record(stream);
  return made;
}

std::shared_ptr<PinnedMemory> GpuDevice::pinned(size_t bytes) {
  bytes = std::bit_ceil(std::max<size_t>(bytes, 4096));
  void* memory = nullptr;
  {
    std::lock_guard lock(mutex_);
    if (auto found = pinned_.find(bytes); found != pinned_.end()) {
      memory = found->second;
      pinned_.erase(found);
    }
  }
  if (!memory) {
    Scope scope(*this);
    cuda::Result result = api_->host_alloc(&memory, bytes, cuda::kHostPortable);
    if (result != cuda::kSuccess) {
      throw Error(ErrorCode::kLibrary, "cannot allocate " + std::to_string(bytes) +
                                           " bytes of pinned memory: " + api_->text_of(result));
    }
  }
  return std::make_shared<PinnedMemory>(shared_from_this(), static_cast<std::byte*>(memory), bytes);
}

cuda::Address GpuDevice::allocate(size_t bytes, cuda::Stream stream) {
  Scope scope(*this);
  cuda::Address address = 0;
  cuda::Result result = api_->alloc_async(&address, std::max<size_t>(bytes, 1), pool_, stream);
  if (result == cuda::kSuccess) return address;
  throw Error(ErrorCode::kLibrary,
              name() + " has no memory for " + std::to_string(bytes) +
                  " bytes: " + api_->text_of(result) +
                  (result == cuda::kOutOfMemory
                       ? "; lower FARANDOLE_GPU_FUSION_THRESHOLD or the framework's memory use"
                       : ""));
}

bool GpuDevice::free(cuda::Address address, cuda::Stream stream) noexcept {
  if (address == 0) return true;
  if (is_capturing(stream)) return false;
  Scope scope(*this);
  api_->free_async(address, stream);
  return true;
}

void GpuDevice::unload_at_end(cuda::Module module) {
  std::lock_guard lock(mutex_);
  modules_.push_back(module);
}

bool GpuDevice::is_capturing(cuda::Stream stream) const noexcept {
  Scope scope(*this);
  int capturing = 0;
  const cuda::Result result = api_->stream_capturing(stream, &capturing);
  return cuda::is_of_captures(result) || (result == cuda::kSuccess && capturing != 0);
}

}  // namespace farandole
