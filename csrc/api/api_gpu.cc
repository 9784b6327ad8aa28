// SPDX-License-Identifier: Apache-2.0
// The part of the C ABI for tensors and memory on GPUs.
#include "api/api.h"

using namespace farandole;

namespace {

cuda::Stream stream_of(uint64_t number) { return reinterpret_cast<cuda::Stream>(number); }

}  // namespace

FARANDOLE_API void farandole_library_folders(const char* folders) {
  std::lock_guard lock(process().mutex);
  process().library_folders = folders_of(folders);
}

FARANDOLE_API int32_t farandole_join_stream(const int64_t* handles, int32_t count,
                                            uint64_t stream) {
  return guarded([&] { runtime()->gpus().join_stream(span_of(handles, count), stream); });
}

FARANDOLE_API int32_t farandole_settled(int64_t handle) {
  return negated([&]() -> int32_t { return runtime()->handles().settled(handle); });
}

FARANDOLE_API int32_t farandole_allocate_on(int32_t device, uint64_t bytes, uint64_t stream,
                                            void** memory) {
  return guarded([&] {
    std::shared_ptr<GpuDevice> gpu = runtime()->gpus().open(device);
    *memory = reinterpret_cast<void*>(gpu->allocate(static_cast<size_t>(bytes), stream_of(stream)));
    std::lock_guard lock(process().on_gpu_mutex);
    process().on_gpu[*memory] = std::move(gpu);
  });
}

FARANDOLE_API int32_t farandole_device_of(uintptr_t address) {
  return negated([&]() -> int32_t { return runtime()->gpus().device_of(address); });
}

FARANDOLE_API int32_t farandole_order_streams(int32_t device, uint64_t before, uint64_t stream) {
  return guarded([&] {
    const auto point = runtime()->gpus().open(device)->recorded(stream_of(before));
    point->make_wait(stream_of(stream));
  });
}

FARANDOLE_API int32_t farandole_free_on(void* memory, uint64_t stream) {
  if (process().forked) return 1;  // first: another thread of the parent may have held the mutex
  std::unique_lock lock(process().on_gpu_mutex);
  auto found = process().on_gpu.extract(memory);
  if (!found) return 1;
  // Removes the entry first: once the memory is free, another thread may be given the same address and insert it.
  lock.unlock();
  if (found.mapped()->free(reinterpret_cast<uintptr_t>(memory), stream_of(stream))) return 1;
  lock.lock();
  process().on_gpu.insert(std::move(found));
  return 0;
}

FARANDOLE_API int32_t farandole_copy(int32_t device, uintptr_t target, uintptr_t source,
                                     uint64_t bytes, uint64_t stream) {
  return guarded([&] {
    const std::shared_ptr<GpuDevice> gpu = runtime()->gpus().open(device);
    const GpuDevice::Scope scope(*gpu);
    gpu->api().check(gpu->api().copy_async(target, source, bytes, stream_of(stream)),
                     "cuMemcpyAsync between GPU and host memory");
    gpu->recorded(stream_of(stream))->wait();
  });
}
