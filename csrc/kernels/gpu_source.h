// SPDX-License-Identifier: Apache-2.0
// The GPU kernel's source text (data/gpu/gpu_module.cc compiles it with NVRTC), name and sizes.
#pragma once

#include "kernels/gpu_chunk.h"

namespace farandole::gpu {

const char* kernel_source();
constexpr const char* kMoveKernel = "farandole_move";
constexpr unsigned kMoveThreads = 512;
// Bytes per thread block: small enough to use every multiprocessor, large enough to keep the list of chunks short.
constexpr unsigned kChunkBytes = 64 * 1024;

}  // namespace farandole::gpu
