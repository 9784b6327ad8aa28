// SPDX-License-Identifier: Apache-2.0
// The interface through which a test runs whole ranks in one thread, with its own time, sleep and threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace farandole {

class SimulatedKernel {
 public:
  virtual ~SimulatedKernel() = default;
  virtual int64_t now_ns() = 0;
  // Sleeps until wake() names the word with one of these bits; returns false if `until_ns` comes first.
  virtual bool sleep(const std::atomic<uint32_t>& word, uint32_t bits, int64_t until_ns) = 0;
  // Wakes at most `count` threads; returns how many.
  virtual int wake(const std::atomic<uint32_t>& word, int count, uint32_t bits) = 0;
  // Lets other threads run. The caller holds no lock.
  virtual void yield() = 0;
  // Starts a thread; returns its number, above 0.
  virtual int start(std::function<void()> run) = 0;
  virtual void join(int thread) = 0;
};

inline SimulatedKernel* g_simulated_kernel = nullptr;  // null: the real kernel

}  // namespace farandole
