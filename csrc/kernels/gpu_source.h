// SPDX-License-Identifier: Apache-2.0
// The GPU kernels' source text, as NVRTC compiles it.
#pragma once

#include "kernels/gpu_chunk.h"

namespace farandole::gpu {

const char* kernel_source();
constexpr const char* kMoveKernel = "farandole_move";
constexpr const char* kDotsKernel = "farandole_dots";
constexpr unsigned kMoveThreads = 512;
// Bytes that one thread block moves: enough blocks for every multiprocessor, few enough to list.
constexpr unsigned kChunkBytes = 64 * 1024;

}  // namespace farandole::gpu
