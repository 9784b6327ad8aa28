// SPDX-License-Identifier: Apache-2.0
// Declarations of the CUDA driver's functions that farandole calls. The driver is found at run time.
// tests/single/test_gpu_declarations.py compares these declarations with NVIDIA's header.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

struct CUctx_st;  // NVIDIA's names, so that handles have the same types as in NVIDIA's headers
struct CUstream_st;
struct CUevent_st;
struct CUmod_st;
struct CUfunc_st;
struct CUmemPoolHandle_st;

namespace farandole::cuda {

using Result = int;
using Device = int;
using Context = CUctx_st*;
using Stream = CUstream_st*;  // the runtime API has the same handles
using Event = CUevent_st*;
using Module = CUmod_st*;
using Function = CUfunc_st*;
using Pool = CUmemPoolHandle_st*;
using Address = unsigned long long;  // of device memory or, with unified addressing, of any memory

constexpr Result kSuccess = 0;
constexpr Result kOutOfMemory = 2;
constexpr Result kNotReady = 600;
// True for CUDA_ERROR_STREAM_CAPTURE_...: an error caused by the capture of a stream into a graph.
constexpr bool is_of_captures(Result result) { return result >= 900 && result <= 908; }
constexpr const char* kOutsideOfCaptures =
    "; a stream is being captured into a CUDA graph. Call farandole before or after the capture, "
    "and capture backward passes in optimizer.no_sync(). Run one step before the first capture, "
    "because NCCL cannot connect during a capture";
constexpr int kCaptureRelaxed = 2;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kEventBlockingSync = 1;
constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kHostPortable = 1;
constexpr int kComputeMajor = 75;
constexpr int kComputeMinor = 76;
constexpr int kMemoryPoolsSupported = 115;
constexpr int kPoolReleaseThreshold = 4;
constexpr int kAllocationPinned = 1;
constexpr int kLocationDevice = 1;
constexpr int kPointerOrdinal = 9;  // attribute of an address: its device

struct Uuid {
  char bytes[16];
};

struct PoolProperties {
  int allocation_type = kAllocationPinned;
  int handle_types = 0;
  struct {
    int type = kLocationDevice;
    int id = 0;
  } location;
  void* security = nullptr;
  size_t max_bytes = 0;  // 0 means the device's maximum
  unsigned char reserved[56] = {};
};

// The driver's functions. cuda.cc lists their symbols; a symbol's suffix, such as _v2, selects a version of the
// signature.
struct Api {
  std::string path;

  Result (*init)(unsigned flags);
  Result (*error_name)(Result result, const char** name);
  Result (*error_text)(Result result, const char** text);
  Result (*device_get)(Device* device, int ordinal);
  Result (*device_name)(char* name, int capacity, Device device);
  Result (*device_attribute)(int* value, int attribute, Device device);
  Result (*device_uuid)(Uuid* uuid, Device device);
  Result (*context_retain)(Context* context, Device device);
  Result (*context_release)(Device device);
  Result (*context_push)(Context context);
  Result (*context_pop)(Context* context);
  Result (*stream_priorities)(int* least, int* greatest);
  Result (*stream_create)(Stream* stream, unsigned flags, int priority);
  Result (*stream_destroy)(Stream stream);
  Result (*stream_wait)(Stream stream, Event event, unsigned flags);
  Result (*stream_capturing)(Stream stream, int* status);
  Result (*exchange_capture_mode)(int* mode);  // exchanges the mode of the calling thread
  Result (*event_create)(Event* event, unsigned flags);
  Result (*event_destroy)(Event event);
  Result (*event_record)(Event event, Stream stream);
  Result (*event_query)(Event event);
  Result (*event_wait)(Event event);  // blocks the calling thread
  Result (*pool_create)(Pool* pool, const PoolProperties* properties);
  Result (*pool_destroy)(Pool pool);
  Result (*pool_attribute)(Pool pool, int attribute, void* value);
  Result (*alloc_async)(Address* address, size_t bytes, Pool pool, Stream stream);
  Result (*free_async)(Address address, Stream stream);
  Result (*copy_async)(Address target, Address source, size_t bytes, Stream stream);
  Result (*pointer_attribute)(void* value, int attribute, Address address);
  Result (*host_alloc)(void** memory, size_t bytes, unsigned flags);
  Result (*host_free)(void* memory);
  Result (*module_load)(Module* module, const void* image);
  Result (*module_unload)(Module module);
  Result (*module_function)(Function* function, Module module, const char* name);
  Result (*launch)(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                   Stream stream, void** parameters, void** extra);

  // If the result is a failure, throws Error(kLibrary) with the text "what: CUDA_ERROR_... (text)".
  void check(Result result, const char* what) const;
  std::string text_of(Result result) const;
};

// Opens and initialises the driver at `path` or, if `path` is "", in the loader's paths. Throws Error(kLibrary) with a
// remedy.
std::shared_ptr<const Api> open(const std::string& path);

}  // namespace farandole::cuda
