// SPDX-License-Identifier: Apache-2.0
// The public functions of the CUDA runtime that NCCL's host code calls, over the driver. Structs are the caller's: only
// what NCCL reads is written.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "lib/gpu/gpu_double/device_kernels.h"
#include "lib/gpu/gpu_double/device_memory.h"
#include "lib/gpu/gpu_double/hardware.h"

using namespace farandole;
using check::Hardware;
using cuda::Address;
using cuda::Event;
using cuda::Pool;
using cuda::Result;
using cuda::Stream;

extern "C" {
Result cuDeviceGetAttribute(int* value, int attribute, int device);
Result cuStreamCreateWithPriority(Stream* stream, unsigned flags, int priority);
Result cuStreamDestroy_v2(Stream stream);
Result cuStreamWaitEvent(Stream stream, Event event, unsigned flags);
Result cuStreamIsCapturing(Stream stream, int* status);
Result cuEventCreate(Event* event, unsigned flags);
Result cuEventDestroy_v2(Event event);
Result cuEventRecord(Event event, Stream stream);
Result cuEventQuery(Event event);
Result cuEventSynchronize(Event event);
Result cuMemAlloc_v2(Address* address, size_t bytes);
Result cuMemFree_v2(Address address);
Result cuMemHostAlloc(void** memory, size_t bytes, unsigned flags);
Result cuMemFreeHost(void* memory);
Result cuMemcpyAsync(Address target, Address source, size_t bytes, Stream stream);
Result cuMemPoolCreate(Pool* pool, const cuda::PoolProperties* properties);
Result cuMemPoolDestroy(Pool pool);
Result cuMemPoolSetAttribute(Pool pool, int attribute, void* value);
Result cuMemAllocFromPoolAsync(Address* address, size_t bytes, Pool pool, Stream stream);
Result cuMemFreeAsync(Address address, Stream stream);
Result cuIpcGetMemHandle(void* handle, Address address);
Result cuIpcCloseMemHandle(Address address);
Result cuThreadExchangeStreamCaptureMode(int* mode);
Result cuLaunchKernel(cuda::Function function, unsigned, unsigned, unsigned, unsigned, unsigned,
                      unsigned, unsigned, Stream stream, void** parameters, void** extra);
}

namespace {

constexpr Result kInvalidValue = 1;
constexpr Result kNotSupported = 801;
thread_local Result last = 0;

// The runtime uses device 0 if nobody has chosen another one.
int device() {
  if (!check::current_device()) check::set_current_device(0);
  return *check::current_device();
}

Result noted(Result result) {
  if (result != 0 && result != cuda::kNotReady) last = result;
  return result;
}

Address address_of(const void* memory) { return reinterpret_cast<Address>(memory); }

// Who waits for a stream waits for all that was in it at the call.
Result drain(Stream stream) {
  Event event = nullptr;
  if (Result wrong = cuEventCreate(&event, 0)) return wrong;
  Result result = cuEventRecord(event, stream);
  if (result == 0) result = cuEventSynchronize(event);
  cuEventDestroy_v2(event);
  return result;
}

bool is_pageable(const void* memory) {
  auto lock = Hardware::instance().lock();
  return !check::mapping_of(address_of(memory)) &&
         !Hardware::instance().is_pinned(address_of(memory)) &&
         !Hardware::instance().device_of(address_of(memory));
}

}  // namespace

extern "C" {

// ---- devices
Result cudaGetDevice(int* out) { return check::give(out, device()); }
Result cudaSetDevice(int chosen) {
  if (chosen < 0 || chosen >= check::kDevices) return noted(kInvalidValue);
  check::set_current_device(chosen);
  return 0;
}
Result cudaGetDeviceCount(int* count) { return check::give(count, check::kDevices); }
Result cudaDeviceGetAttribute(int* value, int attribute, int of) {
  return noted(cuDeviceGetAttribute(value, attribute, of));
}
Result cudaDeviceGetPCIBusId(char* text, int capacity, int of) {
  std::snprintf(text, static_cast<size_t>(capacity), "0000:%02x:00.0", of + 1);
  return 0;
}
Result cudaDeviceGetByPCIBusId(int* of, const char* text) {
  unsigned bus = 0;
  if (std::sscanf(text, "%*x:%x:", &bus) != 1) return noted(kInvalidValue);
  *of = static_cast<int>(bus) - 1;
  return 0;
}
Result cudaGetDeviceProperties(void* properties, int) {
  constexpr size_t kTotalGlobalMemory = 288;  // its offset, in CUDA 12 and 13
  const size_t bytes = size_t{80} << 30;
  std::memcpy(static_cast<char*>(properties) + kTotalGlobalMemory, &bytes, sizeof bytes);
  return 0;
}
Result cudaGetDeviceProperties_v2(void* properties, int of) {
  return cudaGetDeviceProperties(properties, of);
}
Result cudaDeviceCanAccessPeer(int* can, int, int) { return check::give(can, 1); }
Result cudaDeviceEnablePeerAccess(int, unsigned) { return 0; }
Result cudaDeviceSetLimit(int, size_t) { return 0; }
Result cudaDriverGetVersion(int* version) { return check::give(version, 13000); }
Result cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }
Result cudaGetLastError() { return std::exchange(last, 0); }
const char* cudaGetErrorString(Result result) {
  if (cuda::is_of_captures(result)) return "operation not permitted when stream is capturing";
  return result == 0 ? "no error" : "an error of the GPU double";
}
Result cudaThreadExchangeStreamCaptureMode(int* mode) {
  return cuThreadExchangeStreamCaptureMode(mode);
}
// The driver's functions are here, with the suffixes of CUDA's header.
Result cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                        unsigned long long, int* status) {
  Dl_info here = {};
  dladdr(reinterpret_cast<void*>(&cudaGetDevice), &here);
  void* const library = dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  *function = nullptr;
  for (const char* suffix : {"", "_v2", "_v3"}) {
    if (!*function) *function = dlsym(library, (std::string(name) + suffix).c_str());
  }
  dlclose(library);
  constexpr int kFound = 0, kUnknown = 1;
  if (status) *status = *function ? kFound : kUnknown;
  return 0;
}

// ---- streams and events
Result cudaStreamCreateWithFlags(Stream* stream, unsigned flags) {
  device();
  return noted(cuStreamCreateWithPriority(stream, flags, 0));
}
Result cudaStreamDestroy(Stream stream) { return noted(cuStreamDestroy_v2(stream)); }
Result cudaStreamSynchronize(Stream stream) {
  device();
  return noted(drain(stream));
}
Result cudaDeviceSynchronize() { return cudaStreamSynchronize(nullptr); }
Result cudaStreamWaitEvent(Stream stream, Event event, unsigned flags) {
  device();
  return noted(cuStreamWaitEvent(stream, event, flags));
}
Result cudaStreamIsCapturing(Stream stream, int* status) {
  return noted(cuStreamIsCapturing(stream, status));
}
Result cudaStreamGetCaptureInfo(Stream stream, int* status, unsigned long long* id, void** graph,
                                const void** dependencies, const void** edges, size_t* count) {
  if (id) *id = 0;
  if (graph) *graph = nullptr;
  if (dependencies) *dependencies = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaStreamIsCapturing(stream, status);
}
Result cudaStreamGetId(Stream stream, unsigned long long* id) {
  return check::give(id, reinterpret_cast<unsigned long long>(stream));
}
Result cudaEventCreateWithFlags(Event* event, unsigned flags) {
  device();
  return noted(cuEventCreate(event, flags));
}
Result cudaEventCreate(Event* event) { return cudaEventCreateWithFlags(event, 0); }
Result cudaEventDestroy(Event event) { return noted(cuEventDestroy_v2(event)); }
Result cudaEventRecord(Event event, Stream stream) {
  device();
  return noted(cuEventRecord(event, stream));
}
Result cudaEventQuery(Event event) { return noted(cuEventQuery(event)); }
Result cudaEventSynchronize(Event event) { return noted(cuEventSynchronize(event)); }

// ---- memory
Result cudaMalloc(void** memory, size_t bytes) {
  device();
  Address made = 0;
  const Result result = cuMemAlloc_v2(&made, bytes);
  *memory = reinterpret_cast<void*>(made);
  return noted(result);
}
Result cudaFree(void* memory) { return noted(cuMemFree_v2(address_of(memory))); }
Result cudaHostAlloc(void** memory, size_t bytes, unsigned flags) {
  device();
  return noted(cuMemHostAlloc(memory, bytes, flags));
}
Result cudaFreeHost(void* memory) { return noted(cuMemFreeHost(memory)); }
Result cudaHostRegister(void* memory, size_t bytes, unsigned) {
  auto lock = Hardware::instance().lock();
  Hardware::instance().pinned[address_of(memory)] = bytes;
  return 0;
}
Result cudaHostUnregister(void* memory) {
  auto lock = Hardware::instance().lock();
  Hardware::instance().pinned.erase(address_of(memory));
  return 0;
}
Result cudaHostGetDevicePointer(void** out, void* memory, unsigned) {
  return check::give(out, memory);
}
// Pageable memory is read before the call returns.
Result cudaMemcpyAsync(void* target, const void* source, size_t bytes, int, Stream stream) {
  device();
  if (bytes == 0) return 0;
  if (!is_pageable(source)) {
    return noted(cuMemcpyAsync(address_of(target), address_of(source), bytes, stream));
  }
  const auto* const first = static_cast<const std::byte*>(source);
  auto lock = Hardware::instance().lock();
  Hardware::instance().push(stream, [target, kept = std::vector(first, first + bytes)] {
    std::memcpy(target, kept.data(), kept.size());
  });
  return 0;
}
Result cudaMemcpy(void* target, const void* source, size_t bytes, int kind) {
  cudaMemcpyAsync(target, source, bytes, kind, nullptr);
  return cudaStreamSynchronize(nullptr);
}
Result cudaMemcpyBatchAsync(void*, void*, void*, size_t, void*, size_t*, size_t, Stream) {
  return noted(kNotSupported);
}
Result cudaMemsetAsync(void* target, int value, size_t bytes, Stream stream) {
  auto lock = Hardware::instance().lock();
  Hardware::instance().push(stream, [=] { std::memset(target, value, bytes); });
  return 0;
}
Result cudaMemset(void* target, int value, size_t bytes) {
  cudaMemsetAsync(target, value, bytes, nullptr);
  return cudaStreamSynchronize(nullptr);
}
Result cudaMemPoolCreate(Pool* pool, const cuda::PoolProperties* properties) {
  return noted(cuMemPoolCreate(pool, properties));
}
Result cudaMemPoolDestroy(Pool pool) { return noted(cuMemPoolDestroy(pool)); }
Result cudaMemPoolSetAttribute(Pool pool, int attribute, void* value) {
  return cuMemPoolSetAttribute(pool, attribute, value);
}
Result cudaMallocFromPoolAsync(void** memory, size_t bytes, Pool pool, Stream stream) {
  device();
  Address made = 0;
  const Result result = cuMemAllocFromPoolAsync(&made, bytes, pool, stream);
  *memory = reinterpret_cast<void*>(made);
  return noted(result);
}
Result cudaMallocAsync(void** memory, size_t bytes, Stream stream) {
  return cudaMallocFromPoolAsync(memory, bytes, nullptr, stream);
}
Result cudaFreeAsync(void* memory, Stream stream) {
  device();
  return noted(cuMemFreeAsync(address_of(memory), stream));
}
Result cudaIpcGetMemHandle(void* handle, void* memory) {
  return noted(cuIpcGetMemHandle(handle, address_of(memory)));
}
Result cudaIpcCloseMemHandle(void* memory) { return cuIpcCloseMemHandle(address_of(memory)); }

struct PointerAttributes {  // cudaPointerAttributes, without what is reserved
  int type;
  int device;
  void* device_pointer;
  void* host_pointer;
};
Result cudaPointerGetAttributes(PointerAttributes* out, const void* memory) {
  constexpr int kUnregistered = 0, kHost = 1, kDevice = 2;
  auto lock = Hardware::instance().lock();
  const auto on = Hardware::instance().device_of(address_of(memory));
  const bool pinned = Hardware::instance().is_pinned(address_of(memory));
  void* const same = const_cast<void*>(memory);
  *out = {on ? kDevice : pinned ? kHost : kUnregistered, on.value_or(0), same, same};
  return 0;
}

// ---- kernels
Result cudaGetFuncBySymbol(cuda::Function* function, const void* symbol) {
  *function = check::kernel_of(symbol);
  return noted(*function ? 0 : kInvalidValue);
}
Result cudaFuncGetAttributes(void* attributes, const void*) {
  constexpr size_t kOfCuda11 = 56;  // bytes up to preferredShmemCarveout
  std::memset(attributes, 0, kOfCuda11);
  return 0;
}
Result cudaFuncSetAttribute(const void*, int, int) { return 0; }
Result cudaLaunchHostFunc(Stream stream, void (*function)(void*), void* argument) {
  auto& hardware = Hardware::instance();
  auto lock = hardware.lock();
  check::push_thread(hardware, stream, [=] { function(argument); });
  return 0;
}

// ---- graphs: nothing of NCCL's is captured
Result cudaStreamUpdateCaptureDependencies(Stream, void**, void*, size_t, unsigned) {
  return noted(kNotSupported);
}
Result cudaUserObjectCreate(void*, void*, void*, unsigned, unsigned) {
  return noted(kNotSupported);
}
Result cudaGraphRetainUserObject(void*, void*, unsigned, unsigned) { return noted(kNotSupported); }
Result cudaGraphAddDependencies(void*, void*, void*, void*, size_t) { return noted(kNotSupported); }
Result cudaGraphAddEventRecordNode(void*, void*, void*, size_t, Event) {
  return noted(kNotSupported);
}
Result cudaArrayGetInfo(void*, void*, unsigned*, void*) { return noted(kNotSupported); }

}  // extern "C"

struct Dimensions {  // dim3
  unsigned x, y, z;
};
struct PassedHandle {  // cudaIpcMemHandle_t
  char bytes[64];
};
extern "C" Result cuIpcOpenMemHandle_v2(Address* address, PassedHandle handle, unsigned flags);

extern "C" Result cudaIpcOpenMemHandle(void** memory, PassedHandle handle, unsigned flags) {
  Address opened = 0;
  const Result result = cuIpcOpenMemHandle_v2(&opened, handle, flags);
  *memory = reinterpret_cast<void*>(opened);
  return noted(result);
}

extern "C" Result cudaLaunchKernel(const void* symbol, Dimensions grid, Dimensions block,
                                   void** parameters, size_t shared_bytes, Stream stream) {
  device();
  return noted(cuLaunchKernel(check::kernel_of(symbol), grid.x, grid.y, grid.z, block.x, block.y,
                              block.z, static_cast<unsigned>(shared_bytes), stream, parameters,
                              nullptr));
}
