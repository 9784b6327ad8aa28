// SPDX-License-Identifier: Apache-2.0
#include "lib/process_memory.h"

#include <sys/prctl.h>
#include <sys/uio.h>

#include <cerrno>

namespace farandole {

// Without Yama the call fails, and nothing needs to be allowed.
void let_peers_read() { ::prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0); }

int read_process_memory(pid_t pid, uintptr_t address, std::byte* to, size_t bytes) {
  while (bytes > 0) {
    const iovec mine{to, bytes};
    const iovec theirs{reinterpret_cast<void*>(address), bytes};
    const ssize_t read = ::process_vm_readv(pid, &mine, 1, &theirs, 1, 0);
    if (read < 0 && errno == EINTR) continue;
    if (read < 0) return errno;
    if (read == 0) return EFAULT;
    to += read;
    address += static_cast<size_t>(read);
    bytes -= static_cast<size_t>(read);
  }
  return 0;
}

}  // namespace farandole
