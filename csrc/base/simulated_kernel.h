// SPDX-License-Identifier: Apache-2.0
// An interface for tests. The simulation implements time, sleep and threads, and runs whole ranks in a single thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace farandole {

class SimulatedKernel {
 public:
  virtual ~SimulatedKernel() = default;
  virtual int64_t now_ns() = 0;
  // Sleeps until wake() is called for this word and one of these bits. Returns false if `until_ns` comes first.
  virtual bool sleep(const std::atomic<uint32_t>& word, uint32_t bits, int64_t until_ns) = 0;
  // Wakes at most `count` threads. Returns the number of threads that it has woken.
  virtual int wake(const std::atomic<uint32_t>& word, int count, uint32_t bits) = 0;
  // Lets other threads run. The caller must not hold a lock.
  virtual void yield() = 0;
  // Starts a thread. Returns its number, which is above 0.
  virtual int start(std::function<void()> run) = 0;
  virtual void join(int thread) = 0;
};

inline SimulatedKernel* g_simulated_kernel = nullptr;  // null means the real kernel

}  // namespace farandole
