// SPDX-License-Identifier: Apache-2.0
// The driver's functions for memory that processes share: virtual memory, IPC, plain allocations.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "lib/gpu/gpu_double/device_memory.h"
#include "lib/gpu/gpu_double/hardware.h"

using namespace farandole;
using check::Allocation;
using check::Hardware;
using check::IpcHandle;
using cuda::Address;
using cuda::Result;

namespace {

constexpr Result kInvalidValue = 1;
constexpr size_t kGranularity = size_t{2} << 20;
constexpr int kOfDevice = 1;     // CU_MEM_LOCATION_TYPE_DEVICE
constexpr int kDescriptors = 1;  // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

using Handle = unsigned long long;

struct Properties {  // CUmemAllocationProp
  int type;
  int handle_types;
  int location_type;
  int location;
  void* windows;
  unsigned char flags[8];
};

Allocation* allocation_of(Handle handle) { return reinterpret_cast<Allocation*>(handle); }
Handle handle_of(Allocation* allocation) { return reinterpret_cast<Handle>(allocation); }
size_t whole(size_t bytes) { return (bytes + kGranularity - 1) / kGranularity * kGranularity; }

template <class Body>
int locked(Body&& body) {
  auto lock = Hardware::instance().lock();
  return body();
}

}  // namespace

extern "C" {

Result cuMemCreate(Handle* handle, size_t bytes, const Properties* properties, unsigned long long) {
  return check::call("cuMemCreate", [&](auto&) -> int {
    const int device = properties->location_type == kOfDevice ? properties->location : -1;
    Allocation* const made = check::allocate(bytes, device);
    *handle = handle_of(made);
    return made ? 0 : cuda::kOutOfMemory;
  });
}
Result cuMemRelease(Handle handle) {
  return locked([&] { return check::release(allocation_of(handle)), 0; });
}
Result cuMemGetAllocationGranularity(size_t* bytes, const Properties*, int) {
  return check::give(bytes, kGranularity);
}
Result cuMemGetAllocationPropertiesFromHandle(Properties* properties, Handle handle) {
  *properties = {};
  properties->type = cuda::kAllocationPinned;
  properties->handle_types = kDescriptors;
  properties->location_type = kOfDevice;
  properties->location = allocation_of(handle)->device;
  return 0;
}
Result cuMemAddressReserve(Address* start, size_t bytes, size_t, Address, unsigned long long) {
  return check::give(start, check::reserve(bytes));
}
Result cuMemAddressFree(Address start, size_t bytes) {
  check::unreserve(start, bytes);
  return 0;
}
Result cuMemMap(Address start, size_t bytes, size_t offset, Handle handle, unsigned long long) {
  return locked([&] { return check::map(start, bytes, offset, allocation_of(handle)), 0; });
}
Result cuMemUnmap(Address start, size_t) {
  return locked([&] { return check::unmap(start), 0; });
}
Result cuMemSetAccess(Address, size_t, const void*, size_t) { return 0; }
Result cuMemRetainAllocationHandle(Handle* handle, void* address) {
  return check::call("cuMemRetainAllocationHandle", [&](auto&) -> int {
    const auto found = check::mapping_of(reinterpret_cast<Address>(address));
    if (!found) return kInvalidValue;
    ++found->allocation->references;
    *handle = handle_of(found->allocation);
    return 0;
  });
}
Result cuMemGetAddressRange_v2(Address* start, size_t* bytes, Address address) {
  return locked([&] {
    const auto found = check::mapping_of(address);
    if (!found) return kInvalidValue;
    if (start) *start = found->start;
    if (bytes) *bytes = found->bytes;
    return 0;
  });
}
Result cuMemExportToShareableHandle(void* file, Handle handle, int, unsigned long long) {
  const int copied = fcntl(allocation_of(handle)->file, F_DUPFD_CLOEXEC, 0);
  *static_cast<int*>(file) = copied;
  return copied < 0 ? kInvalidValue : 0;
}
Result cuMemImportFromShareableHandle(Handle* handle, void* file, int) {
  const int copied = fcntl(static_cast<int>(reinterpret_cast<intptr_t>(file)), F_DUPFD_CLOEXEC, 0);
  struct stat found = {};
  if (copied < 0 || fstat(copied, &found) != 0) return kInvalidValue;
  const int device = check::current_device().value_or(0);
  *handle = handle_of(check::open_allocation(copied, static_cast<size_t>(found.st_size), device));
  return 0;
}

Result cuMemAlloc_v2(Address* address, size_t bytes) {
  return check::call("cuMemAlloc_v2", [&](auto&) -> int {
    const size_t rounded = whole(bytes);
    Allocation* const made = check::allocate(rounded, check::current_device().value_or(0));
    if (!made) return cuda::kOutOfMemory;
    *address = check::reserve(rounded);
    check::map(*address, rounded, 0, made);
    check::release(made);
    return 0;
  });
}
Result cuMemFree_v2(Address address) {
  return locked([&] {
    const auto found = check::mapping_of(address);
    if (!found) return address ? kInvalidValue : 0;
    check::unmap(found->start);
    check::unreserve(found->start, found->bytes);
    return 0;
  });
}
Result cuIpcGetMemHandle(IpcHandle* handle, Address address) {
  return locked([&] {
    const auto found = check::mapping_of(address);
    if (!found) return kInvalidValue;
    *handle = {getpid(), found->allocation->file, found->bytes, found->allocation->device};
    return 0;
  });
}
Result cuIpcCloseMemHandle(Address address) { return cuMemFree_v2(address); }

}  // extern "C"

// The handle is passed by value, with all its 64 bytes.
struct PassedHandle {
  char bytes[64];
};

extern "C" Result cuIpcOpenMemHandle_v2(Address* address, PassedHandle passed, unsigned) {
  IpcHandle handle;
  std::memcpy(&handle, passed.bytes, sizeof handle);
  const std::string path =
      "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.file);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return kInvalidValue;
  return locked([&] {
    Allocation* const opened = check::open_allocation(file, handle.bytes, handle.device);
    *address = check::reserve(handle.bytes);
    check::map(*address, handle.bytes, 0, opened);
    check::release(opened);
    return 0;
  });
}
