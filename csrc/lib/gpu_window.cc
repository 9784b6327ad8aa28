// SPDX-License-Identifier: Apache-2.0
#include "lib/gpu_window.h"

#include <string>
#include <utility>

#include "core/error.h"

namespace farandole {

GpuWindow::GpuWindow(std::shared_ptr<GpuDevice> device, std::shared_ptr<const nccl::Api> nccl,
                     uint32_t number, size_t bytes)
    : device_(std::move(device)), nccl_(std::move(nccl)), number_(number), bytes_(bytes) {
  GpuDevice::Scope scope(*device_);
  const std::string what = "ncclMemAlloc of " + std::to_string(bytes) + " bytes";
  nccl_->check(nccl_->memory_allocate(&data_, bytes), what.c_str());
}

GpuWindow::~GpuWindow() {
  try {
    GpuDevice::Scope scope(*device_);
    nccl_->memory_free(data_);
  } catch (const Error&) {  // the context is gone, and the memory with it
  }
}

uint32_t GpuWindows::next_number() {
  std::lock_guard lock(mutex_);
  return ++last_;
}

void GpuWindows::add(const std::shared_ptr<GpuWindow>& window) {
  std::lock_guard lock(mutex_);
  windows_[window->number()] = window;
}

std::shared_ptr<GpuWindow> GpuWindows::find(uint32_t number) const {
  std::lock_guard lock(mutex_);
  const auto found = windows_.find(number);
  if (found == windows_.end()) return nullptr;
  auto window = found->second.lock();
  return window && !window->closed() ? window : nullptr;
}

}  // namespace farandole
