// SPDX-License-Identifier: Apache-2.0
#include "lib/ipc/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

#include "base/error.h"

namespace farandole {
namespace {

constexpr int kFixedSize = F_SEAL_SHRINK | F_SEAL_GROW;

size_t fixed_size(const Fd& fd) {
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  struct stat status;
  if (seals < 0 || fstat(fd.get(), &status) != 0) {
    throw_system_error("a peer sent a descriptor that is not shared memory", errno);
  }
  if ((seals & kFixedSize) != kFixedSize) {
    throw Error(ErrorCode::kInternal, "a peer sent shared memory whose size is not fixed");
  }
  return static_cast<size_t>(status.st_size);
}

}  // namespace

Segment Segment::create(const char* label, SegmentSize size, bool inherit) {
  if (size.bytes == 0) throw Error(ErrorCode::kInternal, "a segment must not be empty");
  refuse_too_much(label, size.at_once);
  Fd fd(memfd_create(label, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw_system_error(std::string("cannot create shared memory for ") + label, errno);
  if (ftruncate(fd.get(), static_cast<off_t>(size.bytes)) != 0) {
    throw_system_error(std::string("cannot set the size of shared memory for ") + label, errno);
  }
  allocate_pages(fd.get(), label, 0, size.at_once);
  if (fcntl(fd.get(), F_ADD_SEALS, kFixedSize | F_SEAL_SEAL) != 0) {
    throw_system_error("cannot seal shared memory", errno);
  }
  return Segment(std::move(fd), size.bytes, inherit);
}

Segment Segment::map(Fd fd, bool inherit) {
  const size_t bytes = fixed_size(fd);
  return Segment(std::move(fd), bytes, inherit);
}

Segment::Segment(Fd fd, size_t bytes, bool inherit) : fd_(std::move(fd)) {
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  if (mapped == MAP_FAILED) {
    throw_system_error("cannot map " + std::to_string(bytes) + " bytes of shared memory", errno,
                       "raise the limit of address space (ulimit -v)");
  }
  memory_ = Mapping(static_cast<std::byte*>(mapped), {bytes});
  if (!inherit && madvise(data(), bytes, MADV_DONTFORK) != 0) {
    throw_system_error("cannot exclude shared memory from forked children", errno);
  }
}

}  // namespace farandole
