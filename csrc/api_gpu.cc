// SPDX-License-Identifier: Apache-2.0
// The C ABI for tensors on GPUs.
#include <sstream>

#include "api_entry.h"

using namespace farandole;

FARANDOLE_API void farandole_library_folders(const char* folders) {
  std::lock_guard lock(process().mutex);
  process().library_folders.clear();
  std::istringstream list(folders);
  for (std::string folder; std::getline(list, folder, ':');) {
    process().library_folders.push_back(folder);
  }
}

FARANDOLE_API int64_t farandole_submit_tensor_on(int64_t tensor, uintptr_t input, uintptr_t output,
                                                 uint64_t stream) {
  return negated([&]() -> int64_t {
    auto here = runtime();
    return here->submit(*kept(tensor), reinterpret_cast<const void*>(input),
                        reinterpret_cast<void*>(output), stream);
  });
}

FARANDOLE_API int32_t farandole_join_stream(const int64_t* handles, int32_t count,
                                            uint64_t stream) {
  return guarded([&]() -> int32_t {
    runtime()->join_stream({handles, static_cast<size_t>(count)}, stream);
    return FARANDOLE_OK;
  });
}

FARANDOLE_API int32_t farandole_settled(int64_t handle) {
  return negated([&]() -> int32_t { return runtime()->handles().settled(handle); });
}

FARANDOLE_API int32_t farandole_allocate_on(int32_t device, uint64_t bytes, uint64_t stream,
                                            void** memory) {
  return guarded([&]() -> int32_t {
    std::shared_ptr<GpuDevice> gpu = runtime()->gpu(device);
    *memory = reinterpret_cast<void*>(
        gpu->allocate(static_cast<size_t>(bytes), reinterpret_cast<cuda::Stream>(stream)));
    std::lock_guard lock(process().on_gpu_mutex);
    process().on_gpu[*memory] = std::move(gpu);
    return FARANDOLE_OK;
  });
}

FARANDOLE_API int32_t farandole_device_of(uintptr_t address) {
  return negated([&]() -> int32_t { return runtime()->device_of(address); });
}

FARANDOLE_API int32_t farandole_order_streams(int32_t device, uint64_t before, uint64_t stream) {
  return guarded([&]() -> int32_t {
    const auto point = runtime()->gpu(device)->recorded(reinterpret_cast<cuda::Stream>(before));
    point->make_wait(reinterpret_cast<cuda::Stream>(stream));
    return FARANDOLE_OK;
  });
}

FARANDOLE_API void farandole_free_on(void* memory, uint64_t stream) {
  std::shared_ptr<GpuDevice> device;
  {
    std::lock_guard lock(process().on_gpu_mutex);
    auto found = process().on_gpu.extract(memory);
    if (!found || process().forked) return;
    device = std::move(found.mapped());
  }
  device->free(reinterpret_cast<uintptr_t>(memory), reinterpret_cast<cuda::Stream>(stream));
}
