// SPDX-License-Identifier: Apache-2.0
// The GPU kernel's name, its sizes and its source text, which data/gpu/gpu_module.cc compiles with NVRTC.
#pragma once

#include "kernels/gpu_chunk.h"

namespace farandole::gpu {

const char* kernel_source();
constexpr const char* kMoveKernel = "farandole_move";
constexpr unsigned kMoveThreads = 512;
// Number of bytes that one thread block processes. It is small enough to use every multiprocessor, and large enough to
// keep the list of chunks short.
constexpr unsigned kChunkBytes = 64 * 1024;

}  // namespace farandole::gpu
