// SPDX-License-Identifier: Apache-2.0
#include "lib/gpu/cuda.h"

#include "base/error.h"
#include "lib/os/dl.h"

namespace farandole::cuda {
namespace {

void fill_all(const DynamicLibrary& library, Api& api) {
  library.fill(api.init, "cuInit");
  library.fill(api.error_name, "cuGetErrorName");
  library.fill(api.error_text, "cuGetErrorString");
  library.fill(api.device_get, "cuDeviceGet");
  library.fill(api.device_name, "cuDeviceGetName");
  library.fill(api.device_attribute, "cuDeviceGetAttribute");
  library.fill(api.device_uuid, "cuDeviceGetUuid_v2");
  library.fill(api.context_retain, "cuDevicePrimaryCtxRetain");
  library.fill(api.context_release, "cuDevicePrimaryCtxRelease_v2");
  library.fill(api.context_push, "cuCtxPushCurrent_v2");
  library.fill(api.context_pop, "cuCtxPopCurrent_v2");
  library.fill(api.stream_priorities, "cuCtxGetStreamPriorityRange");
  library.fill(api.stream_create, "cuStreamCreateWithPriority");
  library.fill(api.stream_destroy, "cuStreamDestroy_v2");
  library.fill(api.stream_wait, "cuStreamWaitEvent");
  library.fill(api.stream_capturing, "cuStreamIsCapturing");
  library.fill(api.exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
  library.fill(api.event_create, "cuEventCreate");
  library.fill(api.event_destroy, "cuEventDestroy_v2");
  library.fill(api.event_record, "cuEventRecord");
  library.fill(api.event_query, "cuEventQuery");
  library.fill(api.event_wait, "cuEventSynchronize");
  library.fill(api.pool_create, "cuMemPoolCreate");
  library.fill(api.pool_destroy, "cuMemPoolDestroy");
  library.fill(api.pool_attribute, "cuMemPoolSetAttribute");
  library.fill(api.alloc_async, "cuMemAllocFromPoolAsync");
  library.fill(api.free_async, "cuMemFreeAsync");
  library.fill(api.copy_async, "cuMemcpyAsync");
  library.fill(api.pointer_attribute, "cuPointerGetAttribute");
  library.fill(api.host_alloc, "cuMemHostAlloc");
  library.fill(api.host_free, "cuMemFreeHost");
  library.fill(api.module_load, "cuModuleLoadData");
  library.fill(api.module_unload, "cuModuleUnload");
  library.fill(api.module_function, "cuModuleGetFunction");
  library.fill(api.launch, "cuLaunchKernel");
}

}  // namespace

std::string Api::text_of(Result result) const {
  const char* name = nullptr;
  const char* text = nullptr;
  error_name(result, &name);
  error_text(result, &text);
  return std::string(name ? name : "unknown CUDA error") + " (" + std::to_string(result) +
         (text ? std::string(", ") + text : "") + ")";
}

void Api::check(Result result, const char* what) const {
  if (result == kSuccess) return;
  throw Error(ErrorCode::kLibrary, std::string(what) + ": " + text_of(result) +
                                       (is_of_captures(result) ? kOutsideOfCaptures : ""));
}

std::shared_ptr<const Api> open(const std::string& path) {
  const auto library =
      DynamicLibrary::open({path.empty() ? "libcuda.so.1" : path}, "the CUDA driver",
                           "install NVIDIA's driver, or pass it into the container");
  auto api = std::make_shared<Api>();
  api->path = library.name();
  fill_all(library, *api);
  api->check(api->init(0), "cuInit");
  return api;
}

}  // namespace farandole::cuda
