// SPDX-License-Identifier: Apache-2.0
// Reading the private memory of another process of the same user, in one copy.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace farandole {

// Lets every process of this user read ours, where the Yama module would let only our ancestors.
void let_peers_read();

// Copies `bytes` from `address` in process `pid` (which may be this one). 0, or the errno of what
// kept it from reading all of them: ESRCH (it has ended), EPERM (not allowed), EFAULT (not mapped).
int read_process_memory(pid_t pid, uintptr_t address, std::byte* to, size_t bytes);

}  // namespace farandole
