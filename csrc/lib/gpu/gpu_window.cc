// SPDX-License-Identifier: Apache-2.0
// See gpu_window.h. Opened and closed by the user's threads, registered and dropped by the driver.
#include "lib/gpu/gpu_window.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "base/error.h"

namespace farandole {

GpuWindow::GpuWindow(std::shared_ptr<GpuDevice> device, std::shared_ptr<const nccl::Api> nccl,
                     uint32_t number, size_t bytes)
    : device_(std::move(device)), nccl_(std::move(nccl)), number_(number), bytes_(bytes) {
  if (!nccl_) {
    data_ = reinterpret_cast<void*>(device_->allocate(bytes, device_->stream()));
    device_->recorded(device_->stream())->wait();  // whichever stream comes first may use it
    return;
  }
  GpuDevice::Scope scope(*device_);
  const std::string what = "ncclMemAlloc of " + std::to_string(bytes) + " bytes";
  nccl_->check(nccl_->memory_allocate(&data_, bytes), what.c_str());
}

// Of a job that has ended nobody has looked at the streams. What a stream that never ends may use is not freed: that would
// wait, too.
GpuWindow::~GpuWindow() {
  const Deadline deadline = Deadline::in(std::chrono::seconds{5});
  try {
    is_past();
    if (!std::ranges::all_of(ends_, [&](const auto& end) { return end->fires_by(deadline); })) {
      return;
    }
  } catch (const Error&) {  // what has failed works no more
  }
  if (nccl_) {
    GpuDevice::Scope scope(*device_);
    nccl_->memory_free(data_);
  } else {
    device_->free(address(), device_->stream());
  }
}

void GpuWindow::use(cuda::Stream stream) {
  std::lock_guard lock(mutex_);
  if (!closed_) used_in_.insert(stream);
}

void GpuWindow::close() {
  std::lock_guard lock(mutex_);
  mark_ends();
  closed_ = true;
}

// A stream that is captured now is asked when it no longer is.
void GpuWindow::mark_ends() noexcept {
  std::erase_if(used_in_, [&](cuda::Stream stream) {
    if (device_->is_capturing(stream)) return false;
    try {
      ends_.push_back(device_->recorded(stream));
    } catch (const Error&) {  // what has failed works no more
    }
    return true;
  });
}

bool GpuWindow::is_past() {
  std::lock_guard lock(mutex_);
  mark_ends();
  std::erase_if(ends_, [](const auto& end) { return end->fired(); });
  return used_in_.empty() && ends_.empty();
}

uint32_t GpuWindows::next_number(SetId set) {
  std::lock_guard lock(mutex_);
  return ++last_[set];
}

void GpuWindows::add(SetId set, const std::shared_ptr<GpuWindow>& window) {
  std::lock_guard lock(mutex_);
  windows_[{set, window->number()}] = window;
}

bool GpuWindows::holds(cuda::Address address) const {
  std::lock_guard lock(mutex_);
  return std::ranges::any_of(windows_,
                             [&](const auto& entry) { return entry.second->holds(address); });
}

std::shared_ptr<GpuWindow> GpuWindows::find(SetId set, uint32_t number) const {
  std::lock_guard lock(mutex_);
  const auto found = windows_.find({set, number});
  return found == windows_.end() || found->second->closed() ? nullptr : found->second;
}

void GpuWindows::use(cuda::Stream stream) {
  std::lock_guard lock(mutex_);
  for (const auto& [key, window] : windows_) window->use(stream);
}

void GpuWindows::drop_past() {
  std::lock_guard lock(mutex_);
  std::erase_if(windows_, [](const auto& entry) {
    const auto& [key, window] = entry;
    return window->closed() && window.use_count() == 1 && window->is_past();
  });
}

}  // namespace farandole
