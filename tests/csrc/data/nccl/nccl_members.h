// SPDX-License-Identifier: Apache-2.0
// Members of an NCCL communicator on the double, each in a thread of its own.
#pragma once

#include <thread>
#include <vector>

#include "lib/gpu/gpu_library.h"

namespace farandole::check {

inline nccl::UniqueId new_nccl_id() {
  nccl::UniqueId id;
  gpu_library().nccl->check(gpu_library().nccl->unique_id(&id), "ncclGetUniqueId");
  return id;
}

template <class Body>
void in_threads(int members, Body&& body) {
  std::vector<std::thread> threads;
  for (int member = 0; member < members; ++member) {
    threads.emplace_back([&, member] { body(member); });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace farandole::check
