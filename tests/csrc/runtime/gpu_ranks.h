// SPDX-License-Identifier: Apache-2.0
// Ranks with GPUs over the GPU double. Ranks are threads, since the double lives in one process.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lib/gpu/gpu_library.h"
#include "runtime/runtime_ranks.h"

namespace farandole::check {

constexpr size_t kSizes[] = {1, 300, 5000, 400'000};  // the last one is reduced where it is

inline void on_double(Config& config) {
  config.cuda_library = config.nvrtc_library = gpu_library().path;
  config.nccl_library = gpu_library().nccl->path;
}

// A stream of the user's own, on this rank's GPU.
class UserStream {
 public:
  explicit UserStream(int device) : device_(GpuDevice::open(gpu_library().cuda, device)) {}
  cuda::Stream get() const { return device_->stream(); }
  uint64_t number() const { return reinterpret_cast<uint64_t>(get()); }
  void write(Floats& to, Floats values) { write(to.data(), std::move(values)); }
  void write(float* to, Floats values) {  // in stream order
    auto* work = new std::pair<float*, Floats>(to, std::move(values));
    gpu_library().call(
        get(),
        [](void* argument) {
          auto* pair = static_cast<std::pair<float*, Floats>*>(argument);
          std::copy(pair->second.begin(), pair->second.end(), pair->first);
          delete pair;
        },
        work);
  }
  void synchronize() { device_->recorded(get())->wait(); }

 private:
  std::shared_ptr<GpuDevice> device_;
};

inline Ask on_gpu(Ask ask, int device, const UserStream& stream) {
  ask.device = device;
  ask.stream = stream.number();
  return ask;
}

// As a framework does: wait, then let the own stream wait, then look.
inline void finish_on(TestRank& self, UserStream& stream, const std::vector<Handle>& handles) {
  if (Failure failure = self.wait(handles)) fail("a call failed: " + failure.text);
  self.runtime()->gpus().join_stream(handles, stream.number());
  stream.synchronize();
  for (Handle handle : handles) self.runtime()->handles().release(handle);
}

// Until nobody uses the call's buffers any more.
inline void await_settled(TestRank& self, Handle handle) {
  const Deadline deadline = patience();
  Handles& handles = self.runtime()->handles();
  while (!handles.settled(handle) && !deadline.expired()) std::this_thread::yield();
  CHECK(handles.settled(handle));
}

inline void run_gpu_jobs(std::vector<int> sizes, const Body& body, const Tune& tune = {}) {
  for (int ranks : sizes) {
    for (uint64_t seed : {1, 2}) {
      gpu_library().seed(seed);
      run_job(Kind::kThreads, ranks, body, [&](Config& config) {
        on_double(config);
        if (tune) tune(config);
      });
      CHECK_EQ(gpu_library().alive(), 0);
    }
  }
}

}  // namespace farandole::check
