// SPDX-License-Identifier: Apache-2.0
// Memory of a GPU that NCCL may reduce in place once a communicator knows it. The numbers of windows are equal
// on all ranks that open theirs in one order.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>

#include "lib/gpu_device.h"
#include "lib/nccl.h"

namespace farandole {

class GpuWindow {
 public:
  // Throws Error(kLibrary) that names the bytes. The NCCL must have memory of its own.
  GpuWindow(std::shared_ptr<GpuDevice> device, std::shared_ptr<const nccl::Api> nccl,
            uint32_t number, size_t bytes);
  ~GpuWindow();
  GpuWindow(const GpuWindow&) = delete;
  GpuWindow& operator=(const GpuWindow&) = delete;

  uint32_t number() const { return number_; }
  size_t bytes() const { return bytes_; }
  void* data() const { return data_; }
  cuda::Address address() const { return reinterpret_cast<uintptr_t>(data_); }

  // Its owner needs it no more: communicators that know it let go of it when they are idle.
  void close() { closed_ = true; }
  bool closed() const { return closed_; }

 private:
  const std::shared_ptr<GpuDevice> device_;
  const std::shared_ptr<const nccl::Api> nccl_;
  const uint32_t number_;
  const size_t bytes_;
  void* data_ = nullptr;
  std::atomic<bool> closed_{false};
};

// Those of one job. Any thread.
class GpuWindows {
 public:
  uint32_t next_number();
  void add(const std::shared_ptr<GpuWindow>& window);
  std::shared_ptr<GpuWindow> find(uint32_t number) const;  // nullptr: none, or closed

 private:
  mutable std::mutex mutex_;
  uint32_t last_ = 0;
  std::map<uint32_t, std::weak_ptr<GpuWindow>> windows_;
};

}  // namespace farandole
