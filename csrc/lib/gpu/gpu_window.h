// SPDX-License-Identifier: Apache-2.0
// Memory of a GPU that NCCL may reduce in place once a communicator knows it; where NCCL can't, ordinary memory.
// The numbers of a process set's windows are equal on all its members, who open theirs in one order.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "base/types.h"
#include "lib/gpu/gpu_device.h"
#include "lib/gpu/nccl.h"

namespace farandole {

class GpuWindow {
 public:
  // Throws Error(kLibrary) that names the bytes. `nccl`: one that has memory of its own; nullptr: ordinary memory.
  GpuWindow(std::shared_ptr<GpuDevice> device, std::shared_ptr<const nccl::Api> nccl,
            uint32_t number, size_t bytes);
  ~GpuWindow();
  GpuWindow(const GpuWindow&) = delete;
  GpuWindow& operator=(const GpuWindow&) = delete;

  uint32_t number() const { return number_; }
  size_t bytes() const { return bytes_; }
  void* data() const { return data_; }
  cuda::Address address() const { return reinterpret_cast<uintptr_t>(data_); }

  bool holds(cuda::Address address) const {
    return this->address() <= address && address < this->address() + bytes_;
  }

  // Later work in this stream may use the window, too. The stream must live until close() has returned, or until its
  // capture is over.
  void use(cuda::Stream stream);
  // Its owner needs it no more. Any thread, also one that captures.
  void close();
  bool closed() const { return closed_; }
  // Whether the GPU has done all that was in the streams that have used it when it was closed.
  bool is_past();

 private:
  void mark_ends() noexcept;

  const std::shared_ptr<GpuDevice> device_;
  const std::shared_ptr<const nccl::Api> nccl_;  // nullptr: ordinary memory
  const uint32_t number_;
  const size_t bytes_;
  void* data_ = nullptr;
  std::atomic<bool> closed_{false};
  std::mutex mutex_;
  std::set<cuda::Stream> used_in_{nullptr};  // the default stream, and with it all that wait for it
  std::vector<std::shared_ptr<GpuEvent>> ends_;
};

// Those of one job, and closed ones until the GPU and all communicators are done with them. Any thread.
class GpuWindows {
 public:
  uint32_t next_number(SetId set);
  void add(SetId set, const std::shared_ptr<GpuWindow>& window);
  std::shared_ptr<GpuWindow> find(SetId set, uint32_t number) const;  // nullptr: none, or closed
  bool holds(cuda::Address address) const;                            // one of them, of any set
  void use(cuda::Stream stream);
  void drop_past();

 private:
  mutable std::mutex mutex_;
  std::map<SetId, uint32_t> last_;
  std::map<std::pair<SetId, uint32_t>, std::shared_ptr<GpuWindow>> windows_;
};

}  // namespace farandole
