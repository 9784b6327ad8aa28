// SPDX-License-Identifier: Apache-2.0
// The CUDA driver's functions, over host memory. Signatures are those of lib/gpu/cuda.h.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kernels/gpu_source.h"
#include "lib/gpu/gpu_double/device_kernels.h"
#include "lib/gpu/gpu_double/hardware.h"

using namespace farandole;
using cuda::Address;
using cuda::Event;
using cuda::Result;
using cuda::Stream;

struct CUctx_st {
  int device;
};

namespace {

constexpr const char* kKernels[] = {gpu::kMoveKernel};
constexpr Result kInvalidValue = 1;
constexpr int kMultiprocessors = 16;  // CU_DEVICE_ATTRIBUTE_...
constexpr int kSharedMemoryOptIn = 97;
constexpr int kVirtualMemory = 102;
constexpr int kDescriptorHandles = 103;
constexpr Result kInvalidImage = 200;
constexpr Result kInvalidContext = 201;
CUctx_st contexts[check::kDevices];
thread_local std::vector<cuda::Context> current;

// What NVRTC makes, as long as its own head says: the driver reads to that end, whatever it was given.
const std::string image = "\177ELF" + std::string(5000, 'x') + "end";

// What CUDA refuses without a context, so does the double.
Result has_context() { return current.empty() ? kInvalidContext : cuda::kSuccess; }

Result may_use(check::Hardware& hardware, Stream stream) {
  const Result wrong = has_context();
  return wrong ? wrong : hardware.unusable(stream);
}
// The body of a function that needs a context, and may use the stream.
template <class Body>
int call_in(Stream stream, const char* function, Body&& body) {
  return check::call(function, [&](auto& hardware) -> int {
    const Result wrong = may_use(hardware, stream);
    return wrong ? wrong : (body(hardware), 0);
  });
}
// The body of a function that CUDA calls unsafe while a stream is captured.
template <class Body>
int call_unsafe(const char* function, Body&& body) {
  return check::call(function, [&](auto& hardware) -> int {
    const Result spoiled = hardware.unsafe();
    return spoiled ? spoiled : (body(hardware), 0);
  });
}

template <class T>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace

std::optional<int> check::current_device() {
  return current.empty() ? std::nullopt : std::optional(current.back()->device);
}

void check::set_current_device(int device) {
  contexts[device].device = device;
  if (current.empty()) current.emplace_back();
  current.back() = &contexts[device];
}

extern "C" {

Result cuInit(unsigned) {
  return check::call("cuInit", [](auto&) {});
}
Result cuDriverGetVersion(int* version) { return check::give(version, 13000); }
Result cuGetErrorName(Result, const char** name) {
  return check::give(name, "CUDA_ERROR_OF_THE_DOUBLE");
}
Result cuGetErrorString(Result, const char** text) {
  return check::give(text, "as the test asked");
}
Result cuDeviceGetCount(int* count) { return check::give(count, check::kDevices); }
Result cuDeviceGet(cuda::Device* device, int ordinal) {
  return check::call("cuDeviceGet", [&](auto&) -> int {
    if (ordinal < 0 || ordinal >= check::kDevices) return kInvalidValue;
    *device = ordinal;
    return 0;
  });
}
Result cuDeviceGetName(char* name, int capacity, cuda::Device device) {
  std::snprintf(name, static_cast<size_t>(capacity), "double %d", device);
  return 0;
}
Result cuDeviceGetAttribute(int* value, int attribute, cuda::Device) {
  switch (attribute) {
    case cuda::kComputeMajor: *value = 9; break;
    case cuda::kMemoryPoolsSupported: *value = 1; break;
    case kVirtualMemory:
    case kDescriptorHandles: *value = 1; break;
    case kSharedMemoryOptIn: *value = 227 << 10; break;
    case kMultiprocessors: *value = 132; break;
    default: *value = 0;
  }
  return 0;
}
Result cuDeviceGetUuid_v2(cuda::Uuid* uuid, cuda::Device device) {
  std::memset(uuid, 0, sizeof *uuid);
  uuid->bytes[0] = static_cast<char>(device + 1);
  return 0;
}

Result cuDevicePrimaryCtxRetain(cuda::Context* context, cuda::Device device) {
  return check::call("cuDevicePrimaryCtxRetain", [&](auto& hardware) {
    contexts[device].device = device;
    *context = &contexts[device];
    ++hardware.alive;
  });
}
Result cuDevicePrimaryCtxRelease_v2(cuda::Device) {
  return check::call("cuDevicePrimaryCtxRelease_v2", [&](auto& hardware) { --hardware.alive; });
}
Result cuCtxPushCurrent_v2(cuda::Context context) {
  current.push_back(context);
  return 0;
}
Result cuCtxPopCurrent_v2(cuda::Context* context) {
  if (current.empty()) return kInvalidContext;
  *context = current.back();
  current.pop_back();
  return 0;
}
Result cuCtxGetCurrent(cuda::Context* context) {
  return check::give(context, current.empty() ? nullptr : current.back());
}
Result cuCtxSetCurrent(cuda::Context context) {
  if (context) {
    check::set_current_device(context->device);
  } else if (!current.empty()) {
    current.pop_back();
  }
  return 0;
}
Result cuCtxGetDevice(cuda::Device* device) {
  if (Result wrong = has_context()) return wrong;
  *device = current.back()->device;
  return 0;
}
Result cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return has_context();
}

Result cuStreamCreateWithPriority(Stream* stream, unsigned flags, int) {
  return check::call("cuStreamCreateWithPriority", [&](auto& hardware) -> int {
    if (Result wrong = has_context()) return wrong;
    *stream = hardware.add_stream(current.back()->device, flags != cuda::kStreamNonBlocking);
    return 0;
  });
}
Result cuStreamDestroy_v2(Stream stream) {
  return check::call("cuStreamDestroy_v2", [&](auto& hardware) { hardware.remove_stream(stream); });
}
Result cuStreamIsCapturing(Stream stream, int* status) {
  return check::call("cuStreamIsCapturing", [&](auto& hardware) -> int {
    hardware.must_live(stream);
    if (hardware.captured_beside(stream)) return check::kCaptureImplicit;
    *status = hardware.stream_of(stream)->capturing;
    return 0;
  });
}
Result cuStreamWaitEvent(Stream stream, Event event, unsigned) {
  return call_in(stream, "cuStreamWaitEvent", [&](auto& hardware) {
    hardware.push(stream, [passed = event->passed] { return *passed; }, [] {});
  });
}

Result cuEventCreate(Event* event, unsigned) {
  return check::call("cuEventCreate", [&](auto& hardware) -> int {
    if (Result wrong = has_context()) return wrong;
    ++hardware.alive;
    *event = new CUevent_st;
    return 0;
  });
}
Result cuEventDestroy_v2(Event event) {
  return check::call("cuEventDestroy_v2", [&](auto& hardware) {
    --hardware.alive;
    delete event;  // streams and hosts that wait have its point
  });
}
Result cuEventRecord(Event event, Stream stream) {
  return call_in(stream, "cuEventRecord", [&](auto& hardware) {
    event->passed = std::make_shared<bool>(false);
    hardware.push(stream, [passed = event->passed] { *passed = true; });
  });
}
Result cuEventQuery(Event event) {
  return check::call("cuEventQuery", [&](auto& hardware) -> int {
    if (Result spoiled = hardware.unsafe()) return spoiled;
    return *event->passed ? 0 : cuda::kNotReady;
  });
}
Result cuEventSynchronize(Event event) {
  return call_unsafe("cuEventSynchronize", [&](auto& hardware) {
    hardware.wait([passed = event->passed] { return *passed; });
  });
}

Result cuMemPoolCreate(cuda::Pool* pool, const cuda::PoolProperties*) {
  return call_unsafe("cuMemPoolCreate", [&](auto& hardware) {
    ++hardware.alive;
    *pool = reinterpret_cast<cuda::Pool>(pool);  // never looked at
  });
}
Result cuMemPoolDestroy(cuda::Pool) {
  return call_unsafe("cuMemPoolDestroy", [&](auto& hardware) { --hardware.alive; });
}
Result cuMemPoolSetAttribute(cuda::Pool, int, void*) { return 0; }
// Stream-ordered: what is read before the stream has come here is poison.
Result cuMemAllocFromPoolAsync(Address* address, size_t bytes, cuda::Pool, Stream stream) {
  return call_in(stream, "cuMemAllocFromPoolAsync", [&](auto& hardware) {
    void* memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    std::memset(memory, 0xb5, bytes);
    ++hardware.alive;
    *address = reinterpret_cast<Address>(memory);
    hardware.devices_of_memory[*address] = {current.back()->device, bytes};
    hardware.push(stream, [] {});
  });
}
Result cuPointerGetAttribute(void* value, int attribute, Address address) {
  return check::call("cuPointerGetAttribute", [&](auto& hardware) -> int {
    const std::optional<int> device = hardware.device_of(address);
    if (attribute != cuda::kPointerOrdinal || !device) return kInvalidValue;
    *static_cast<int*>(value) = *device;
    return 0;
  });
}
Result cuMemFreeAsync(Address address, Stream stream) {
  return check::call("cuMemFreeAsync", [&](auto& hardware) -> int {
    if (Result wrong = may_use(hardware, stream)) return wrong;
    if (hardware.stream_of(stream)->capturing != 0) return check::kCaptureUnsupported;
    --hardware.alive;
    hardware.devices_of_memory.erase(address);
    hardware.push(stream, [address] { std::free(pointer<void>(address)); });
    return 0;
  });
}
Result cuMemcpyAsync(Address target, Address source, size_t bytes, Stream stream) {
  return call_in(stream, "cuMemcpyAsync", [&](auto& hardware) {
    hardware.push(stream,
                  [=] { std::memmove(pointer<void>(target), pointer<void>(source), bytes); });
  });
}
Result cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  return check::call("cuMemHostAlloc", [&](auto& hardware) -> int {
    if (Result wrong = has_context()) return wrong;
    if (Result spoiled = hardware.unsafe()) return spoiled;
    ++hardware.alive;
    *memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    hardware.pinned[reinterpret_cast<Address>(*memory)] = bytes;
    return 0;
  });
}
Result cuMemFreeHost(void* memory) {
  return call_unsafe("cuMemFreeHost", [&](auto& hardware) {
    --hardware.alive;
    hardware.pinned.erase(reinterpret_cast<Address>(memory));
    std::free(memory);
  });
}

Result cuModuleLoadData(cuda::Module* module, const void* given) {
  return check::call("cuModuleLoadData", [&](auto& hardware) -> int {
    if (Result wrong = has_context()) return wrong;
    if (Result spoiled = hardware.unsafe()) return spoiled;
    if (std::memcmp(given, image.data(), 4) != 0) return kInvalidImage;
    if (std::memcmp(given, image.data(), image.size()) != 0) {
      std::fprintf(stderr, "GPU double: the image of a module is not what NVRTC has made\n");
      std::abort();
    }
    ++hardware.alive;
    *module = reinterpret_cast<cuda::Module>(module);
    return 0;
  });
}
Result cuModuleUnload(cuda::Module) {
  return check::call("cuModuleUnload", [&](auto& hardware) { --hardware.alive; });
}
Result cuModuleGetFunction(cuda::Function* function, cuda::Module, const char* name) {
  for (uintptr_t i = 0; i < std::size(kKernels); ++i) {
    if (std::strcmp(name, kKernels[i]) != 0) continue;
    *function = reinterpret_cast<cuda::Function>(i + 1);
    return 0;
  }
  return 500;  // not found
}
Result cuLaunchKernel(cuda::Function function, unsigned blocks, unsigned, unsigned, unsigned,
                      unsigned, unsigned, unsigned, Stream stream, void** parameters,
                      void** extra) {
  return check::call("cuLaunchKernel", [&](auto& hardware) -> int {
    if (Result wrong = may_use(hardware, stream)) return wrong;
    if (reinterpret_cast<uintptr_t>(function) > std::size(kKernels)) {
      return check::launch_nccl(hardware, function, stream, parameters, extra);
    }
    const Address chunks = *static_cast<const Address*>(parameters[0]);
    hardware.push(stream, [=] { check::move_on_host(pointer<void>(chunks), blocks); });
    return 0;
  });
}

// ---- NVRTC: nothing is compiled; the driver above knows the kernels

using Program = void*;
int nvrtcVersion(int* major, int* minor) { return check::give(major, 13), check::give(minor, 0); }
const char* nvrtcGetErrorString(int) { return "as the test asked"; }
int nvrtcCreateProgram(Program* program, const char*, const char*, int, const char* const*,
                       const char* const*) {
  return check::give(program, nullptr);
}
int nvrtcDestroyProgram(Program*) { return 0; }
int nvrtcCompileProgram(Program, int, const char* const*) {
  return check::call("nvrtcCompileProgram", [](auto&) {});
}
int nvrtcGetCUBINSize(Program, size_t* bytes) { return check::give(bytes, image.size()); }
int nvrtcGetCUBIN(Program, char* out) {
  image.copy(out, image.size());
  return 0;
}
int nvrtcGetPTXSize(Program, size_t* bytes) { return nvrtcGetCUBINSize(nullptr, bytes); }
int nvrtcGetPTX(Program, char* out) { return nvrtcGetCUBIN(nullptr, out); }
int nvrtcGetProgramLogSize(Program, size_t* bytes) { return nvrtcGetCUBINSize(nullptr, bytes); }
int nvrtcGetProgramLog(Program, char* out) { return nvrtcGetCUBIN(nullptr, out); }

}  // extern "C"
