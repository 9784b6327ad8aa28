// SPDX-License-Identifier: Apache-2.0
// The part of the C ABI that allocates memory for zero copy.
#include <pthread.h>

#include "api/api_entry.h"

namespace farandole {

Process::Process() {
  pthread_atfork(
      [] {
        process().mutex.lock();  // a child finds it free, and the runtime whole
        process().arenas.before_fork();
      },
      [] {
        process().arenas.after_fork_in_parent();
        process().mutex.unlock();
      },
      [] {
        process().arenas.after_fork_in_child();
        process().mutex.unlock();
      });
}

}  // namespace farandole

using namespace farandole;

FARANDOLE_API int32_t farandole_allocate(uint64_t bytes, void** memory) {
  return guarded([&]() -> int32_t {
    *memory = process().arenas.allocate(bytes);
    return FARANDOLE_OK;
  });
}

FARANDOLE_API void farandole_deallocate(void* memory) {
  if (process().forked) return;  // the pages are the parent's
  guarded([&]() -> int32_t {
    process().arenas.release(static_cast<std::byte*>(memory));
    return FARANDOLE_OK;
  });
}
