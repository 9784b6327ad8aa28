// SPDX-License-Identifier: Apache-2.0
// NVML's functions, without which NCCL does not start: devices by their number, all at one NVLink switch.
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "lib/gpu/gpu_double/hardware.h"

namespace {

constexpr int kNotSupported = 3;
constexpr int kPeers = 0;  // a link's capability
constexpr unsigned kLinkState = 165;

struct Field {
  unsigned number, scope;
  int64_t time, lateness;
  int type, result;
  uint64_t value;
};

using Handle = uintptr_t;  // the device's number and one

}  // namespace

extern "C" {

int nvmlInit_v2() { return 0; }
int nvmlInit() { return 0; }
int nvmlShutdown() { return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) {
  return farandole::check::give(count, farandole::check::kDevices);
}
int nvmlDeviceGetHandleByIndex(unsigned index, Handle* handle) {
  return farandole::check::give(handle, index + 1);
}
int nvmlDeviceGetHandleByPciBusId(const char* text, Handle* handle) {
  unsigned bus = 0;
  if (std::sscanf(text, "%*x:%x:", &bus) != 1) return 2;
  *handle = bus;
  return 0;
}
int nvmlDeviceGetIndex(Handle handle, unsigned* index) {
  return farandole::check::give(index, static_cast<unsigned>(handle - 1));
}
const char* nvmlErrorString(int) { return "an error of the GPU double"; }
int nvmlDeviceGetNvLinkState(Handle, unsigned, int* enabled) {
  return farandole::check::give(enabled, 1);
}
// No device of this machine, so a switch.
int nvmlDeviceGetNvLinkRemotePciInfo_v2(Handle, unsigned, char* bus) {
  std::strcpy(bus, "0000:ff:00.0");
  return 0;
}
int nvmlDeviceGetNvLinkRemotePciInfo(Handle handle, unsigned link, char* bus) {
  return nvmlDeviceGetNvLinkRemotePciInfo_v2(handle, link, bus);
}
int nvmlDeviceGetNvLinkCapability(Handle, unsigned, int capability, unsigned* able) {
  return farandole::check::give(able, capability == kPeers ? 1 : 0);
}
int nvmlDeviceGetCudaComputeCapability(Handle, int* major, int* minor) {
  return farandole::check::give(major, 9), farandole::check::give(minor, 0);
}
int nvmlDeviceGetP2PStatus(Handle, Handle, int, int* status) {
  *status = 0;  // it works
  return 0;
}
int nvmlDeviceGetPciInfo_v3(Handle, void*) { return kNotSupported; }
int nvmlDeviceGetCurrPcieLinkGeneration(Handle, unsigned*) { return kNotSupported; }
int nvmlDeviceGetCurrPcieLinkWidth(Handle, unsigned*) { return kNotSupported; }
int nvmlDeviceGetPcieLinkMaxSpeed(Handle, int*) { return kNotSupported; }
int nvmlDeviceGetFieldValues(Handle, int count, Field* fields) {
  for (int i = 0; i < count; ++i) {
    fields[i].result = fields[i].number == kLinkState ? 0 : kNotSupported;
    fields[i].value = 1;
  }
  return 0;
}

}  // extern "C"
