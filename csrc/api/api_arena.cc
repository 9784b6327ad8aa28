// SPDX-License-Identifier: Apache-2.0
// The part of the C ABI that allocates host memory for zero copy.
#include <pthread.h>

#include "api/api_entry.h"

namespace farandole {

Process::Process() {
  pthread_atfork(
      [] {
        process().mutex.lock();  // so that a child finds it unlocked, and the runtime consistent
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
  return guarded([&] { *memory = process().arenas.allocate(bytes); });
}

FARANDOLE_API void farandole_deallocate(void* memory) {
  if (process().forked) return;  // the pages belong to the parent
  guarded([&] { process().arenas.release(static_cast<std::byte*>(memory)); });
}
