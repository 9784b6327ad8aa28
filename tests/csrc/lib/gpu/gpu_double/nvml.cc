// SPDX-License-Identifier: Apache-2.0
// NVML's functions, without which NCCL does not start: devices by their number, no NVLink.
#include <cstdio>

#include "lib/gpu/gpu_double/hardware.h"

namespace {

constexpr int kNotSupported = 3;
using Handle = uintptr_t;  // the device's number and one

}  // namespace

extern "C" {

int nvmlInit_v2() { return 0; }
int nvmlInit() { return 0; }
int nvmlShutdown() { return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) {
  *count = farandole::check::kDevices;
  return 0;
}
int nvmlDeviceGetHandleByIndex(unsigned index, Handle* handle) {
  *handle = index + 1;
  return 0;
}
int nvmlDeviceGetHandleByPciBusId(const char* text, Handle* handle) {
  unsigned bus = 0;
  if (std::sscanf(text, "%*x:%x:", &bus) != 1) return 2;
  *handle = bus;
  return 0;
}
int nvmlDeviceGetIndex(Handle handle, unsigned* index) {
  *index = static_cast<unsigned>(handle - 1);
  return 0;
}
const char* nvmlErrorString(int) { return "an error of the GPU double"; }
int nvmlDeviceGetNvLinkState(Handle, unsigned, int*) { return kNotSupported; }
int nvmlDeviceGetNvLinkRemotePciInfo(Handle, unsigned, void*) { return kNotSupported; }
int nvmlDeviceGetNvLinkCapability(Handle, unsigned, int, unsigned*) { return kNotSupported; }
int nvmlDeviceGetCudaComputeCapability(Handle, int* major, int* minor) {
  *major = 9;
  *minor = 0;
  return 0;
}
int nvmlDeviceGetP2PStatus(Handle, Handle, int, int* status) {
  *status = 0;  // it works
  return 0;
}
int nvmlDeviceGetPciInfo_v3(Handle, void*) { return kNotSupported; }
int nvmlDeviceGetCurrPcieLinkGeneration(Handle, unsigned*) { return kNotSupported; }
int nvmlDeviceGetCurrPcieLinkWidth(Handle, unsigned*) { return kNotSupported; }
int nvmlDeviceGetPcieLinkMaxSpeed(Handle, int*) { return kNotSupported; }
int nvmlDeviceGetFieldValues(Handle, int, void*) { return kNotSupported; }

}  // extern "C"
