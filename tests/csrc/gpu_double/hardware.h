// SPDX-License-Identifier: Apache-2.0
// The double's device: streams, events, and the one thread that works.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include "kernels/gpu_chunk.h"
#include "lib/gpu/cuda.h"
#include "random.h"

// Whether the point of the last record has passed. Who waits keeps that point: the event may be
// recorded again meanwhile.
struct CUevent_st {
  std::shared_ptr<bool> passed = std::make_shared<bool>(true);
};

namespace farandole::check {

struct Work {
  std::function<bool()> ready;  // under the lock; may note that the stream has come so far
  std::function<void()> run;
};

}  // namespace farandole::check

struct CUstream_st {
  int device = 0;
  std::deque<farandole::check::Work> queue;
  int capturing = 0;
  bool running = false;
};

namespace farandole::check {

class Hardware {
 public:
  static Hardware& instance();

  using Lock = std::unique_lock<std::mutex>;
  Lock lock() { return Lock(mutex_); }

  // ---- under the lock
  cuda::Stream stream_of(cuda::Stream stream);  // the default stream for 0, 1 and 2
  cuda::Stream add_stream(int device);
  void remove_stream(cuda::Stream stream);
  void push(cuda::Stream stream, std::function<void()> run);
  void push(cuda::Stream stream, std::function<bool()> ready, std::function<void()> run);
  void changed() { condition_.notify_all(); }
  // None of its streams has anything to do; the default stream, which is all devices', does not count.
  bool is_idle(int device) const;
  template <class Predicate>
  void wait(Predicate&& predicate) {
    Lock adopted(mutex_, std::adopt_lock);
    condition_.wait(adopted, predicate);
    adopted.release();
  }
  // What injected failures say about the next call of `function`; 0: it succeeds.
  int next_result(const char* function);

  struct Fault {
    int calls;
    int result;
  };
  std::map<std::string, Fault> faults;
  std::set<int> open_gates;
  struct Memory {
    int device;
    size_t bytes;
  };
  std::map<cuda::Address, Memory> devices_of_memory;
  std::optional<int> device_of(cuda::Address address) const;
  int next_gate = 1;
  int alive = 0;
  Random random{1};

 private:
  Hardware();
  void work();
  bool advance(Lock& lock);

  std::mutex mutex_;
  std::condition_variable condition_;
  std::set<std::unique_ptr<CUstream_st>> streams_;
  std::unique_ptr<CUstream_st> default_stream_;
  CUstream_st* favourite_ = nullptr;
};

// The body of a function of the double: body(hardware) under the lock, unless a test wants it to fail.
template <class Body>
int call(const char* function, Body&& body) {
  Hardware& hardware = Hardware::instance();
  auto lock = hardware.lock();
  const int injected = hardware.next_result(function);
  return injected != 0 ? injected : body(hardware);
}

std::optional<int> current_device();  // that of this thread's context

// The host's versions of the kernels.
void move_on_host(const void* chunks, unsigned count);
void dots_on_host(const gpu::DotTask& task, unsigned blocks);

}  // namespace farandole::check
