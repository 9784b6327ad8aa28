// SPDX-License-Identifier: Apache-2.0
#include "lib/gpu/gpu_window.h"

#include <algorithm>
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

GpuWindow::~GpuWindow() {
  if (!nccl_) {
    device_->free(address(), device_->stream());
    return;
  }
  try {
    GpuDevice::Scope scope(*device_);
    nccl_->memory_free(data_);
  } catch (const Error&) {  // the context is gone, and the memory with it
  }
}

void GpuWindow::close() {
  try {
    device_->synchronize();
  } catch (const Error&) {  // what has failed works no more
  }
  closed_ = true;
}

uint32_t GpuWindows::next_number(SetId set) {
  std::lock_guard lock(mutex_);
  return ++last_[set];
}

void GpuWindows::add(SetId set, const std::shared_ptr<GpuWindow>& window) {
  std::lock_guard lock(mutex_);
  std::erase_if(windows_, [](const auto& entry) { return entry.second.expired(); });
  windows_[{set, window->number()}] = window;
}

bool GpuWindows::holds(cuda::Address address) const {
  std::lock_guard lock(mutex_);
  return std::ranges::any_of(windows_, [&](const auto& entry) {
    const auto window = entry.second.lock();
    return window && window->holds(address);
  });
}

std::shared_ptr<GpuWindow> GpuWindows::find(SetId set, uint32_t number) const {
  std::lock_guard lock(mutex_);
  const auto found = windows_.find({set, number});
  if (found == windows_.end()) return nullptr;
  auto window = found->second.lock();
  return window && !window->closed() ? window : nullptr;
}

}  // namespace farandole
