// SPDX-License-Identifier: Apache-2.0
// The GPU kernel's source text, as NVRTC compiles it.
#pragma once

namespace farandole::gpu {

const char* kernel_source();
constexpr const char* kMoveKernel = "farandole_move";
constexpr unsigned kMoveThreads = 512;
// Bytes that one thread block moves: enough blocks for every multiprocessor, few enough to list.
constexpr unsigned kChunkBytes = 64 * 1024;

}  // namespace farandole::gpu
