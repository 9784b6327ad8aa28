// SPDX-License-Identifier: Apache-2.0
#include "lib/os/process.h"

#include <poll.h>
#include <sched.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <sstream>

#include "base/error.h"
#include "lib/os/text_file.h"

namespace farandole {
namespace {

using CoreSet = std::array<cpu_set_t, 8>;  // 8,192 cores, which is Linux's maximum

// Returns the fields that follow the name in the main thread's stat file. The name may contain blanks and brackets.
// /proc/PID/stat holds the same values, but qemu-user fabricates that file for the calling process.
std::istringstream stat_after_name(pid_t pid) {
  const std::string number = std::to_string(pid);
  const std::string text = read_text_file("/proc/" + number + "/task/" + number + "/stat");
  const size_t end = text.rfind(')');
  return std::istringstream(end == std::string::npos ? "" : text.substr(end + 1));
}

uint64_t inode_of(const char* path) {
  struct stat status;
  return stat(path, &status) == 0 ? status.st_ino : 0;
}

[[noreturn]] void throw_gone(pid_t pid) {
  throw Error(ErrorCode::kPeer, "process " + std::to_string(pid) + " has ended");
}

}  // namespace

std::optional<PidFd> PidFd::open(pid_t pid, uint64_t start_time) {
  PidFd opened(Fd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))));
  if (!opened.fd_) {
    if (errno == ESRCH) throw_gone(pid);
    if (errno == ENOSYS || errno == EPERM) return std::nullopt;
    throw_system_error("cannot watch process " + std::to_string(pid), errno);
  }
  // Checked after opening, because until then the kernel may have given this PID to another process.
  if (process_start_time(pid) != start_time || opened.exited()) throw_gone(pid);
  return opened;
}

bool PidFd::exited() const {
  pollfd event{fd_.get(), POLLIN, 0};
  return poll(&event, 1, 0) == 1;
}

std::optional<uint64_t> process_start_time(pid_t pid) {
  constexpr int kFieldsBefore = 19;  // fields 3 to 21
  std::istringstream fields = stat_after_name(pid);
  std::string skipped;
  for (int i = 0; i < kFieldsBefore; ++i) fields >> skipped;
  uint64_t ticks = 0;
  if (!(fields >> ticks)) return std::nullopt;
  return ticks;
}

bool is_stopped(pid_t pid) {
  char state = 0;
  stat_after_name(pid) >> state;
  return state == 'T' || state == 't';
}

int cores_of(std::span<const pid_t> processes) {
  CoreSet together{};
  for (pid_t process : processes) {
    CoreSet own{};
    if (sched_getaffinity(process, sizeof own, own.data()) != 0) continue;
    CPU_OR_S(sizeof own, together.data(), together.data(), own.data());
  }
  return std::max(1, CPU_COUNT_S(sizeof together, together.data()));
}

uint64_t pid_namespace() { return inode_of("/proc/self/ns/pid"); }
uint64_t net_namespace() { return inode_of("/proc/thread-self/ns/net"); }

std::string host_name() {
  char name[256] = {};
  return gethostname(name, sizeof name - 1) == 0 ? name : "?";
}

std::string boot_id() {
  std::string id = read_text_file("/proc/sys/kernel/random/boot_id");
  while (!id.empty() && id.back() == '\n') id.pop_back();
  return id;
}

}  // namespace farandole
