// SPDX-License-Identifier: Apache-2.0
// The double's device: streams, events, and the one thread that works.
#pragma once

#include <chrono>
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
#include <type_traits>

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
  bool blocking = true;  // it and the default stream wait for each other
  int capturing = 0;     // as cuStreamIsCapturing: 1, or 2 once it is spoiled
  std::thread::id captor;
  bool running = false;
};

namespace farandole::check {

class Hardware {
 public:
  static Hardware& instance();

  using Lock = std::unique_lock<std::mutex>;
  Lock lock() { return Lock(mutex_); }

  // ---- under the lock
  cuda::Stream stream_of(cuda::Stream stream) const;  // the default stream for 0, 1 and 2
  cuda::Stream add_stream(int device, bool blocking);
  void remove_stream(cuda::Stream stream);
  void push(cuda::Stream stream, std::function<void()> run);
  void push(cuda::Stream stream, std::function<bool()> ready, std::function<void()> run);
  void changed() { condition_.notify_all(); }
  template <class Predicate>
  void wait(Predicate&& predicate) {
    Lock adopted(mutex_, std::adopt_lock);
    condition_.wait(adopted, predicate);
    adopted.release();
  }
  // Lets others have the lock for a while.
  void pause() {
    Lock adopted(mutex_, std::adopt_lock);
    adopted.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(5));
    adopted.lock();
    adopted.release();
  }
  // Who may do this, which CUDA calls potentially unsafe, while some stream is captured: nobody in a thread that captures,
  // or in any other one that has not exchanged its mode. It spoils the graph.
  int unsafe();
  // 0: the stream may be used. The default stream may not while a stream is captured that waits for it: whoever tries,
  // in whatever mode, spoils the graph.
  int unusable(cuda::Stream stream);
  // A blocking stream of this device that is captured, where `stream` is the default stream.
  cuda::Stream captured_beside(cuda::Stream stream) const;
  // To use a stream that was destroyed is undefined: it ends the test.
  void must_live(cuda::Stream stream) const;
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
  std::map<cuda::Address, size_t> pinned;  // memory of the host
  bool is_pinned(cuda::Address address) const;
  int next_gate = 1;
  bool launches_held = false;  // ncclGroupEnd launches nothing meanwhile
  bool aborts_held = false;
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
  if (injected != 0) return injected;
  if constexpr (std::is_void_v<decltype(body(hardware))>) {
    return body(hardware), 0;
  } else {
    return body(hardware);
  }
}

// The result of a function that succeeds and tells one thing.
template <class T>
int give(T* to, std::type_identity_t<T> value) {
  return *to = value, 0;
}

constexpr int kCaptureUnsupported = 900;  // CUDA_ERROR_STREAM_CAPTURE_...
constexpr int kCaptureInvalidated = 901;
constexpr int kCaptureImplicit = 906;

constexpr int kDevices = 16;
std::optional<int> current_device();  // that of this thread's context
void set_current_device(int device);

// The host's version of the kernel.
void move_on_host(const void* chunks, unsigned count);

}  // namespace farandole::check
