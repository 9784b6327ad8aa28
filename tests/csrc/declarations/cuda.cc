// SPDX-License-Identifier: Apache-2.0
// Compiled, never run: our declarations of the driver beside NVIDIA's cuda.h and nvrtc.h.
#include <cuda.h>
#include <nvrtc.h>

#include "declarations/same_abi.h"
#include "lib/gpu/cuda.h"
#include "lib/gpu/nvrtc.h"

namespace cuda = farandole::cuda;
namespace nvrtc = farandole::nvrtc;
using Api = cuda::Api;

static_assert(cuda::kSuccess == CUDA_SUCCESS);
static_assert(cuda::kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(cuda::kNotReady == CUDA_ERROR_NOT_READY);
static_assert(cuda::kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(cuda::kEventBlockingSync == CU_EVENT_BLOCKING_SYNC);
static_assert(cuda::kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(cuda::kHostPortable == CU_MEMHOSTALLOC_PORTABLE);
static_assert(cuda::kComputeMajor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
static_assert(cuda::kComputeMinor == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
static_assert(cuda::kMemoryPoolsSupported == CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED);
static_assert(cuda::kPoolReleaseThreshold == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD);
static_assert(cuda::kAllocationPinned == CU_MEM_ALLOCATION_TYPE_PINNED);
static_assert(cuda::kLocationDevice == CU_MEM_LOCATION_TYPE_DEVICE);
static_assert(cuda::kPointerOrdinal == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);

static_assert(sizeof(cuda::Address) == sizeof(CUdeviceptr));
static_assert(sizeof(cuda::Device) == sizeof(CUdevice));
static_assert(sizeof(cuda::Uuid) == sizeof(CUuuid));
static_assert(std::is_same_v<cuda::Stream, CUstream>);
static_assert(std::is_same_v<cuda::Event, CUevent>);
static_assert(std::is_same_v<cuda::Context, CUcontext>);
using Pool = cuda::PoolProperties;
static_assert(sizeof(Pool) == sizeof(CUmemPoolProps));
static_assert(offsetof(Pool, location) == offsetof(CUmemPoolProps, location));
static_assert(offsetof(Pool, max_bytes) == offsetof(CUmemPoolProps, maxSize));

// cuda.h maps the plain names to the versions that it declares; ours name the version.
static_assert(alike(&Api::init, &cuInit));
static_assert(alike(&Api::error_name, &cuGetErrorName));
static_assert(alike(&Api::error_text, &cuGetErrorString));
static_assert(alike(&Api::device_get, &cuDeviceGet));
static_assert(alike(&Api::device_name, &cuDeviceGetName));
static_assert(alike(&Api::device_attribute, &cuDeviceGetAttribute));
static_assert(alike(&Api::device_uuid, &cuDeviceGetUuid));
static_assert(alike(&Api::context_retain, &cuDevicePrimaryCtxRetain));
static_assert(alike(&Api::context_release, &cuDevicePrimaryCtxRelease));
static_assert(alike(&Api::context_push, &cuCtxPushCurrent));
static_assert(alike(&Api::context_pop, &cuCtxPopCurrent));
static_assert(alike(&Api::stream_priorities, &cuCtxGetStreamPriorityRange));
static_assert(alike(&Api::stream_create, &cuStreamCreateWithPriority));
static_assert(alike(&Api::stream_destroy, &cuStreamDestroy));
static_assert(alike(&Api::stream_wait, &cuStreamWaitEvent));
static_assert(alike(&Api::stream_capturing, &cuStreamIsCapturing));
static_assert(alike(&Api::exchange_capture_mode, &cuThreadExchangeStreamCaptureMode));
static_assert(alike(&Api::event_create, &cuEventCreate));
static_assert(alike(&Api::event_destroy, &cuEventDestroy));
static_assert(alike(&Api::event_record, &cuEventRecord));
static_assert(alike(&Api::event_query, &cuEventQuery));
static_assert(alike(&Api::event_wait, &cuEventSynchronize));
static_assert(alike(&Api::pool_create, &cuMemPoolCreate));
static_assert(alike(&Api::pool_destroy, &cuMemPoolDestroy));
static_assert(alike(&Api::pool_attribute, &cuMemPoolSetAttribute));
static_assert(alike(&Api::alloc_async, &cuMemAllocFromPoolAsync));
static_assert(alike(&Api::free_async, &cuMemFreeAsync));
static_assert(alike(&Api::copy_async, &cuMemcpyAsync));
static_assert(alike(&Api::pointer_attribute, &cuPointerGetAttribute));
static_assert(alike(&Api::host_alloc, &cuMemHostAlloc));
static_assert(alike(&Api::host_free, &cuMemFreeHost));
static_assert(alike(&Api::module_load, &cuModuleLoadData));
static_assert(alike(&Api::module_unload, &cuModuleUnload));
static_assert(alike(&Api::module_function, &cuModuleGetFunction));
static_assert(alike(&Api::launch, &cuLaunchKernel));

using Compiler = nvrtc::Api;
static_assert(NVRTC_SUCCESS == 0);
static_assert(std::is_same_v<nvrtc::Program, nvrtcProgram>);
static_assert(alike(&Compiler::get_version, &nvrtcVersion));
static_assert(alike(&Compiler::error_text, &nvrtcGetErrorString));
static_assert(alike(&Compiler::create, &nvrtcCreateProgram));
static_assert(alike(&Compiler::destroy, &nvrtcDestroyProgram));
static_assert(alike(&Compiler::compile, &nvrtcCompileProgram));
static_assert(alike(&Compiler::cubin_bytes, &nvrtcGetCUBINSize));
static_assert(alike(&Compiler::cubin, &nvrtcGetCUBIN));
static_assert(alike(&Compiler::ptx_bytes, &nvrtcGetPTXSize));
static_assert(alike(&Compiler::ptx, &nvrtcGetPTX));
static_assert(alike(&Compiler::log_bytes, &nvrtcGetProgramLogSize));
static_assert(alike(&Compiler::log, &nvrtcGetProgramLog));
