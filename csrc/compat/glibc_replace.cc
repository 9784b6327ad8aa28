// SPDX-License-Identifier: Apache-2.0
// Replaces functions that glibc 2.28 lacks with code that needs only glibc 2.28. See glibc_forward.S.
#include <sys/random.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>

extern "C" {

#if defined(__x86_64__)
constexpr int kStatVersion = 1;  // _STAT_VER
#else
constexpr int kStatVersion = 0;
#endif

int __xstat(int version, const char* path, struct stat* result);
int __fxstat(int version, int fd, struct stat* result);
int __lxstat(int version, const char* path, struct stat* result);

int __wrap_stat(const char* path, struct stat* result) {
  return __xstat(kStatVersion, path, result);
}
int __wrap_fstat(int fd, struct stat* result) { return __fxstat(kStatVersion, fd, result); }
int __wrap_lstat(const char* path, struct stat* result) {
  return __lxstat(kStatVersion, path, result);
}
int __wrap_stat64(const char* path, struct stat* result) {
  return __xstat(kStatVersion, path, result);
}
int __wrap_fstat64(int fd, struct stat* result) { return __fxstat(kStatVersion, fd, result); }

// If this were not 0, libstdc++'s shared_ptr would count without atomics. The core has threads, so it is 0.
char __wrap___libc_single_threaded = 0;

// libstdc++'s random_device calls this function.
uint32_t __wrap_arc4random() {
  uint32_t value = 0;
  while (::getrandom(&value, sizeof value, 0) != static_cast<ssize_t>(sizeof value)) {
    if (errno != EINTR) std::abort();
  }
  return value;
}

}  // extern "C"
