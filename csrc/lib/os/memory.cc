// SPDX-License-Identifier: Apache-2.0
#include "lib/os/memory.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <sstream>
#include <string>

#include "base/error.h"
#include "lib/os/text_file.h"

namespace farandole {
namespace {

constexpr size_t kStep = size_t{64} << 20;
constexpr const char* kRemedy =
    "raise the memory limit of the control group, which includes shared memory (in a container "
    "--memory, and --shm-size or /dev/shm), or start fewer ranks on this host";
constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

// The names of files and keys, which differ between control groups v2 and v1.
struct Generation {
  const char* membership;  // the middle field of a line of /proc/self/cgroup
  const char* root;
  const char* limit;
  const char* usage;
  const char* cache[2];  // keys in memory.stat
};

constexpr Generation kGenerations[] = {
    {"", "/sys/fs/cgroup", "memory.max", "memory.current", {"inactive_file", "active_file"}},
    {"memory",
     "/sys/fs/cgroup/memory",
     "memory.limit_in_bytes",
     "memory.usage_in_bytes",
     {"total_inactive_file", "total_active_file"}},
};

// Returns the number in the line "key number".
std::optional<uint64_t> find_number(const std::string& text, const std::string& key) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string word;
    uint64_t number = 0;
    if (words >> word >> number && word == key) return number;
  }
  return std::nullopt;
}

std::optional<uint64_t> read_number(const std::string& path) {
  std::istringstream text(read_text_file(path));
  uint64_t number = 0;
  if (!(text >> number)) return std::nullopt;  // absent, or "max"
  return number;
}

uint64_t left_in(const std::string& folder, const Generation& names) {
  const std::optional<uint64_t> limit = read_number(folder + "/" + names.limit);
  const std::optional<uint64_t> usage = read_number(folder + "/" + names.usage);
  if (!limit || !usage) return kUnlimited;
  const std::string details = read_text_file(folder + "/memory.stat");
  uint64_t cache = 0;
  for (const char* key : names.cache) cache += find_number(details, key).value_or(0);
  const uint64_t used = *usage - std::min(*usage, cache);
  return *limit - std::min(*limit, used);
}

// Returns the process's control group ("/a/b"), or "/" if it has none.
std::string own_group(const Generation& names) {
  std::istringstream lines(read_text_file("/proc/self/cgroup"));
  const std::string wanted = std::string(":") + names.membership + ":";
  for (std::string line; std::getline(lines, line);) {
    const size_t colon = line.find(':');
    if (colon != std::string::npos && line.compare(colon, wanted.size(), wanted) == 0) {
      return line.substr(colon + wanted.size());
    }
  }
  return "/";
}

uint64_t left_in_groups(const Generation& names) {
  uint64_t left = left_in(names.root, names);
  for (std::string group = own_group(names); group.size() > 1;) {
    left = std::min(left, left_in(names.root + group, names));
    group.resize(group.rfind('/'));
  }
  return left;
}

std::string cannot_allocate(const char* label, size_t bytes) {
  return "cannot allocate " + std::to_string(bytes) + " bytes of shared memory for " + label;
}

}  // namespace

void Unmap::operator()(std::byte* memory) const { munmap(memory, bytes); }

size_t available_memory() {
  uint64_t left = kUnlimited;
  const std::optional<uint64_t> kilobytes =
      find_number(read_text_file("/proc/meminfo"), "MemAvailable:");
  if (kilobytes) left = *kilobytes * 1024;
  for (const Generation& names : kGenerations) left = std::min(left, left_in_groups(names));
  return left;
}

void refuse_too_much(const char* label, size_t bytes) {
  const size_t available = available_memory();
  if (bytes <= available) return;
  throw Error(ErrorCode::kLibrary, cannot_allocate(label, bytes) + ": only " +
                                       std::to_string(available) + " are available; " + kRemedy);
}

void prefer_huge_pages(void* begin, size_t bytes) {
  if (bytes < 2 * kHugePageBytes) return;
  const size_t before = reinterpret_cast<uintptr_t>(begin) % kPageBytes;
  const size_t skipped = before == 0 ? 0 : kPageBytes - before;
  madvise(static_cast<std::byte*>(begin) + skipped, (bytes - skipped) / kPageBytes * kPageBytes,
          MADV_HUGEPAGE);
}

// Allocates in steps, because any signal, such as that of a profiler, makes fallocate() start from the beginning.
void allocate_pages(int fd, const char* label, uint64_t offset, size_t bytes) {
  for (size_t done = 0; done < bytes;) {
    const size_t step = std::min(kStep, bytes - done);
    if (fallocate(fd, 0, static_cast<off_t>(offset + done), static_cast<off_t>(step)) == 0) {
      done += step;
    } else if (errno != EINTR) {
      throw_system_error(cannot_allocate(label, bytes), errno, kRemedy);
    }
  }
}

void free_pages(int fd, uint64_t offset, size_t bytes) noexcept {
  fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
            static_cast<off_t>(bytes));
}

}  // namespace farandole
