// SPDX-License-Identifier: Apache-2.0
// The GPU kernels' source text, which data/gpu/gpu_module compiles with NVRTC, and their names and sizes.
#pragma once

#include "kernels/gpu_chunk.h"

namespace farandole::gpu {

const char* kernel_source();
constexpr const char* kMoveKernel = "farandole_move";
constexpr unsigned kMoveThreads = 512;
// Bytes per thread block: small enough to occupy every multiprocessor, large enough for a short list.
constexpr unsigned kChunkBytes = 64 * 1024;

}  // namespace farandole::gpu
