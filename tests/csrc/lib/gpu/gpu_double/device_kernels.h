// SPDX-License-Identifier: Apache-2.0
// What a library of NCCL's real host code launches. A kernel runs in a thread of its own, because it waits for peers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "lib/gpu/cuda.h"
#include "lib/gpu/gpu_double/hardware.h"

namespace farandole::check {

// NCCL's device code: its version, and the names of its functions in the order of its table ("AllReduce_Sum_f32_RING_SIMPLE").
struct NcclCode {
  int version = 0;
  std::vector<std::string> functions;
};
const NcclCode& nccl_code();

cuda::Function kernel_of(const void* host_function);  // nullptr: none
cuda::Result launch_nccl(Hardware& hardware, cuda::Function function, cuda::Stream stream,
                         void** parameters, void** extra);

// Host code in a stream that may block: in a thread, which the stream waits for.
void push_thread(Hardware& hardware, cuda::Stream stream, std::function<void()> run);

// All of a kernel's channels, until they have ended or NCCL has raised its abort flag.
void run_channels(const std::vector<std::byte>& arguments);

}  // namespace farandole::check
