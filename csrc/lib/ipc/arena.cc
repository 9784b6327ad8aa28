// SPDX-License-Identifier: Apache-2.0
#include "lib/ipc/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/types.h"

namespace farandole {
namespace {

constexpr size_t kMostBytes = size_t{256} << 30;
constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, which exists since Linux 5.14
constexpr const char* kAddressRemedy = "raise the limit of address space (ulimit -v)";

Fd sparse_memfd(size_t bytes) {
  Fd fd(memfd_create("farandole-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw_system_error("cannot create shared memory for arrays", errno);
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0 ||
      fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw_system_error("cannot set the size of shared memory for arrays", errno,
                       "raise the limit of file sizes (ulimit -f)");
  }
  return fd;
}

void map_over(std::byte* at, size_t bytes, int flags, int fd, uint64_t offset) {
  void* mapped =
      mmap(at, bytes, PROT_READ | PROT_WRITE, flags | MAP_FIXED, fd, static_cast<off_t>(offset));
  if (mapped == MAP_FAILED) throw_system_error("cannot map an arena", errno, kAddressRemedy);
}

}  // namespace

// Aligns the mapping, so that every process can use the huge pages of the memfd.
Mapping map_arena(int fd, bool inherit) {
  struct stat status;
  if (fstat(fd, &status) != 0) throw_system_error("cannot map an arena", errno);
  const auto bytes = static_cast<size_t>(status.st_size);
  constexpr size_t kAlign = kHugePageBytes;
  void* room =
      mmap(nullptr, bytes + kAlign, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) {
    throw_system_error("cannot map an arena of " + std::to_string(bytes >> 20) + " MiB", errno,
                       kAddressRemedy);
  }
  auto* const first = static_cast<std::byte*>(room);
  const size_t before =
      round_up(reinterpret_cast<uintptr_t>(first), kAlign) - reinterpret_cast<uintptr_t>(first);
  if (before > 0) munmap(first, before);
  munmap(first + before + bytes, kAlign - before);
  Mapping mapping(first + before, {bytes});
  map_over(mapping.get(), bytes, MAP_SHARED, fd, 0);
  madvise(mapping.get(), bytes, MADV_DONTDUMP);  // otherwise core files contain all arrays
  if (!inherit) madvise(mapping.get(), bytes, MADV_DONTFORK);
  return mapping;
}

size_t Arena::default_bytes() {
  const auto machine =
      static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return round_up(std::min(machine, kMostBytes), kHugePageBytes);
}

Arena::Arena(size_t bytes)
    : bytes_(round_up(bytes, kHugePageBytes)), fd_(sparse_memfd(bytes_)), free_{{0, bytes_}} {}

std::byte* Arena::allocate(size_t bytes) {
  std::lock_guard lock(mutex_);
  if (!mapping_) mapping_ = map_arena(fd_.get(), /*inherit=*/true);
  const size_t page = bytes >= kHugePageBytes ? kHugePageBytes : kPageBytes;
  const size_t room = round_up(std::max<size_t>(bytes, 1), page);
  if (room >= kHugePageBytes) refuse_too_much("an array", room);  // the check takes 0.1 ms
  const uint64_t offset = take(room, page);
  try {
    fill(offset, room);
  } catch (...) {
    free_pages(fd_.get(), offset, room);
    give_back(offset, room);
    throw;
  }
  allocations_.emplace(offset, Allocation{room});
  in_use_ = true;
  return mapping_.get() + offset;
}

uint64_t Arena::take(size_t bytes, size_t alignment) {
  for (auto [start, length] : free_) {
    const uint64_t offset = round_up(start, alignment);
    if (offset + bytes > start + length) continue;
    free_.erase(start);
    if (offset > start) free_.emplace(start, offset - start);
    if (offset + bytes < start + length) {
      free_.emplace(offset + bytes, start + length - offset - bytes);
    }
    return offset;
  }
  throw Error(ErrorCode::kLibrary, "no room for " + std::to_string(bytes) +
                                       " bytes in an arena of " + std::to_string(bytes_) +
                                       " bytes");
}

void Arena::give_back(uint64_t offset, size_t bytes) {
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == offset + bytes) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  free_.emplace(offset, bytes);
}

// Only page faults allocate huge pages; fallocate() does not. If memory is short, a page fault raises SIGBUS, whereas
// MADV_POPULATE_WRITE returns an error. On kernels that lack MADV_POPULATE_WRITE, the allocation gets small pages.
void Arena::fill(uint64_t offset, size_t bytes) {
  std::byte* const begin = mapping_.get() + offset;
  if (bytes >= kHugePageBytes) {
    madvise(begin, bytes, MADV_HUGEPAGE);
    if (madvise(begin, bytes, kPopulateWrite) == 0) return;
  }
  allocate_pages(fd_.get(), "an array", offset, bytes);
}

bool Arena::release(std::byte* memory) {
  std::lock_guard lock(mutex_);
  const auto found = around(memory);
  if (found == allocations_.end() || memory != mapping_.get() + found->first) return false;
  const auto [offset, allocation] = *found;
  if (allocation.retired) {
    madvise(memory, allocation.bytes, MADV_DONTNEED);
    allocations_[offset].released = true;
    return true;
  }
  allocations_.erase(found);
  if (allocation.bytes >= kHugePageBytes) madvise(memory, allocation.bytes, MADV_NOHUGEPAGE);
  free_pages(fd_.get(), offset, allocation.bytes);
  give_back(offset, allocation.bytes);
  return true;
}

Arena::Allocations::const_iterator Arena::around(const std::byte* memory) const {
  const std::byte* const begin = mapping_.get();
  if (begin == nullptr || memory < begin || memory >= begin + bytes_) return allocations_.end();
  const auto offset = static_cast<uint64_t>(memory - begin);
  auto next = allocations_.upper_bound(offset);
  if (next == allocations_.begin()) return allocations_.end();
  const auto found = std::prev(next);
  return offset < found->first + found->second.bytes ? found : allocations_.end();
}

std::optional<uint64_t> Arena::offset_of(const std::byte* memory) const {
  if (!in_use_) return std::nullopt;
  std::lock_guard lock(mutex_);
  const auto found = around(memory);
  if (found == allocations_.end() || found->second.retired) return std::nullopt;
  return static_cast<uint64_t>(memory - mapping_.get());
}

void Arena::retire(const std::byte* memory) {
  std::lock_guard lock(mutex_);
  const auto found = around(memory);
  if (found == allocations_.end() || found->second.retired) return;
  const uint64_t offset = found->first;
  make_private(offset, found->second.bytes);
  // A write makes a page private. An atomic OR with 0 cannot overwrite a store of another thread.
  for (size_t at = 0; at < found->second.bytes; at += kPageBytes) {
    std::atomic_ref(*reinterpret_cast<unsigned char*>(mapping_.get() + offset + at)).fetch_or(0);
  }
  allocations_[offset].retired = true;
}

void Arena::read_old(uint64_t offset, std::byte* into, size_t bytes) const {
  // Linux reads up to 2 GiB of a memfd at once, and a block has at most 1 GiB.
  const ssize_t got = pread(fd_.get(), into, bytes, static_cast<off_t>(offset));
  if (std::cmp_not_equal(got, bytes)) {
    throw_system_error("cannot read an arena", got < 0 ? errno : EIO);
  }
}

void Arena::make_private(uint64_t offset, size_t bytes) {
  map_over(mapping_.get() + offset, bytes, MAP_PRIVATE, fd_.get(), offset);
}

bool Arena::has_retired() const {
  std::lock_guard lock(mutex_);
  return std::any_of(allocations_.begin(), allocations_.end(),
                     [](const auto& entry) { return entry.second.retired; });
}

bool Arena::empty() const {
  std::lock_guard lock(mutex_);
  return std::all_of(allocations_.begin(), allocations_.end(),
                     [](const auto& entry) { return entry.second.released; });
}

void Arena::forget_peers() {
  std::lock_guard lock(mutex_);
  for (const auto& [offset, allocation] : allocations_) {
    if (allocation.retired) free_pages(fd_.get(), offset, allocation.bytes);
  }
}

void Arena::after_fork_in_child() {
  for (auto& [offset, allocation] : allocations_) {
    // If this process is the child of a forked child, these pages are already private.
    if (!std::exchange(allocation.retired, true)) make_private(offset, allocation.bytes);
  }
  mutex_.unlock();
}

ArenaPool::ArenaPool(size_t arena_bytes) : arena_bytes_(arena_bytes) {}

std::byte* ArenaPool::allocate(size_t bytes) {
  std::lock_guard lock(mutex_);
  if (arenas_.empty()) arenas_.push_back(std::make_shared<Arena>(arena_bytes_));
  return arenas_.back()->allocate(bytes);
}

void ArenaPool::release(std::byte* memory) {
  std::lock_guard lock(mutex_);
  const auto found = std::find_if(arenas_.begin(), arenas_.end(),
                                  [memory](const auto& arena) { return arena->release(memory); });
  if (found == arenas_.end() || *found == arenas_.back() || !(*found)->empty()) return;
  arenas_.erase(found);
}

std::shared_ptr<Arena> ArenaPool::share() {
  std::lock_guard lock(mutex_);
  if (arenas_.empty() || arenas_.back()->has_retired()) {
    if (!arenas_.empty()) arenas_.back()->forget_peers();
    std::erase_if(arenas_, [](const auto& arena) { return arena->empty(); });
    arenas_.push_back(std::make_shared<Arena>(arena_bytes_));
  }
  return arenas_.back();
}

void ArenaPool::before_fork() {
  mutex_.lock();
  for (const auto& arena : arenas_) arena->before_fork();
}

void ArenaPool::after_fork_in_parent() {
  for (const auto& arena : arenas_) arena->after_fork_in_parent();
  mutex_.unlock();
}

void ArenaPool::after_fork_in_child() {
  for (const auto& arena : arenas_) arena->after_fork_in_child();
  mutex_.unlock();
}

}  // namespace farandole
