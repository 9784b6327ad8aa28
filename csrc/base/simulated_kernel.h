// SPDX-License-Identifier: Apache-2.0
// The interface between the core and a test that runs whole ranks in one thread. The test stands in for the kernel: time,
// sleep and threads are its own.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace farandole {

class SimulatedKernel {
 public:
  virtual ~SimulatedKernel() = default;
  virtual int64_t now_ns() = 0;
  // Returns false at `until_ns`, else when wake() names the word with one of these bits.
  virtual bool sleep(const std::atomic<uint32_t>& word, uint32_t bits, int64_t until_ns) = 0;
  // Returns how many threads it wakes, at most `count`.
  virtual int wake(const std::atomic<uint32_t>& word, int count, uint32_t bits) = 0;
  // Other threads may run. The caller holds no lock.
  virtual void yield() = 0;
  // Starts a thread, and returns its number, above 0.
  virtual int start(std::function<void()> run) = 0;
  virtual void join(int thread) = 0;
};

inline SimulatedKernel* g_simulated_kernel = nullptr;  // null: the real one

}  // namespace farandole
